"""gpt-oss: experts in MXFP4, what changes its logits, folders as published, and tensors that do not
fit. test_families.py has its logits and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.gpt_oss import SIZES, in_mxfp4, save_gpt_oss
from tests.models.helpers import (
    MAX_POSITIONS,
    PagedRunner,
    assert_logits_in_all_ways,
    load,
    random_tokens,
    reference_logits,
)
from tests.models.published import GPT_OSS, GPT_OSS_20B
from tllm_spec.attention.vanilla import VanillaAttention
from tllm_spec.distributed.communicator import SINGLE_RANK
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.models.registry import model_config_of
from tllm_spec.models.rotary import _frequencies

TOKENS = random_tokens(MAX_POSITIONS, seed=3)


def test_experts_in_mxfp4_have_the_logits_of_their_numbers(tmp_path: Path) -> None:
    expected = reference_logits(in_mxfp4(tmp_path, save_gpt_oss(tmp_path)), TOKENS)
    assert load(tmp_path).config.quantisation.four_bit is not None
    assert_logits_in_all_ways(tmp_path, VanillaAttention, expected, TOKENS)


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": MAX_POSITIONS},
        {"swiglu_limit": 7.0},
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"rope_parameters": SIZES["rope_parameters"] | {"truncate": True}},
    ],
)
def test_each_key_changes_the_reference(change: dict[str, Any], tmp_path: Path) -> None:
    found = [reference_logits(save_gpt_oss(tmp_path, **each), TOKENS) for each in ({}, change)]
    assert (found[0] - found[1]).abs()[-1].max() > 1e-2


@pytest.mark.parametrize("name", ["sinks", "router.bias", "o_proj.bias", "down_proj_bias"])
def test_sinks_and_biases_change_the_logits(name: str, tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    found = [PagedRunner(load(tmp_path)).step({0: TOKENS})[0]]
    tensors = load_file(tmp_path / "model.safetensors")
    own = [each for each in tensors if each.endswith(name)]
    assert len(own) == 4
    save_file(tensors | {each: 0 * tensors[each] for each in own}, tmp_path / "model.safetensors")
    found.append(PagedRunner(load(tmp_path)).step({0: TOKENS})[0])
    assert (found[0] - found[1]).abs()[-1].max() > 1e-2


def test_the_frequencies_are_those_of_the_published_models() -> None:
    """YaRN whose ramp is not cut to whole pairs; the values are transformers'."""
    found, amplitude = _frequencies(model_config_of(GPT_OSS_20B).rope, 64)
    expected = {0: 1.0, 1: 0.6890443, 9: 0.03170570, 12: 6.794959e-3, 17: 1.293187e-4}
    for pair, value in expected.items():
        assert found[pair].item() == pytest.approx(value, rel=1e-5)
    assert amplitude == pytest.approx(1.3465736)


@pytest.mark.parametrize("name", GPT_OSS)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    raw = GPT_OSS[name]
    config, theirs = model_config_of(raw), transformers.GptOssConfig(**copy.deepcopy(raw))
    assert config.moe is not None and config.quantisation.four_bit is not None
    assert (config.moe.num_experts, config.moe.top_k, config.moe.intermediate_size) == (
        *(theirs.num_local_experts, theirs.num_experts_per_tok, theirs.intermediate_size),
    )
    assert config.moe.swiglu_limit == theirs.swiglu_limit
    assert config.qkv_bias and config.o_bias and config.has_sinks and config.moe.has_bias
    first, second = config.layer_groups(SINGLE_RANK)
    assert first.geometry.span == KeySpan(theirs.sliding_window, slides=True)
    assert second.geometry.span is None and second.layers[0] == 1
    assert len(first.layers) == len(second.layers) == theirs.num_hidden_layers / 2
    assert config.max_positions == theirs.max_position_embeddings
    keeps = config.quantisation.keeps
    assert keeps("model.layers.3.mlp.experts.7.gate_proj")
    others = "self_attn.q_proj", "mlp.router"
    assert not any(keeps(f"model.layers.3.{each}") for each in others) and not keeps("lm_head")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_missing_tensor_of_experts_is_named(tmp_path: Path) -> None:
    in_mxfp4(tmp_path, save_gpt_oss(tmp_path))
    kept = stored(tmp_path)
    for name in ("down_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"):
        absent = f"model.layers.2.mlp.experts.{name}"
        tensors = {each: tensor for each, tensor in kept.items() if each != absent}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"has no {absent}\."):
            load(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "model.layers.0.self_attn.extra",
            torch.ones(4),
            r"surplus model\.layers\.0\.self_attn\.e",
        ),
        (
            "model.layers.0.mlp.experts.down_proj_scales",
            torch.ones(6, 64, 2, dtype=torch.uint8),
            r"down_proj_blocks is torch\.uint8 of the shape \[6, 64, 3, 16\], and its scales",
        ),
        (
            "model.layers.0.mlp.experts.gate_up_proj_bias",
            torch.ones(192),
            r"gate_up_proj_bias has the shape \[192\]; it must have a row an expert",
        ),
        ("model.layers.0.self_attn.sinks", torch.ones(3), r"sinks has the shape \[3\].* \[4\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    name: str, tensor: torch.Tensor, message: str, tmp_path: Path
) -> None:
    in_mxfp4(tmp_path, save_gpt_oss(tmp_path))
    save_file(stored(tmp_path) | {name: tensor}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
