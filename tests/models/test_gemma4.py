"""Gemma 4's text model: logits, heads and pages of two sizes, and folders as published."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.distributed.thread_ranks import ThreadGroup
from tests.models.gemma4 import (
    FULL,
    KINDS,
    LARGER,
    ROPES,
    SLIDING,
    TOWERS,
    save_gemma4,
    save_larger,
    save_with_towers,
)
from tests.models.helpers import MAX_POSITIONS, PagedRunner, load, random_tokens, reference_logits
from tllm_spec.attention.geometry import AttentionGeometry, KVFormat
from tllm_spec.distributed.communicator import SINGLE_RANK, Communicator
from tllm_spec.executor.engine.memory_plan import divide, own_groups
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.llm import LLM
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.registry import model_config_of
from tllm_spec.sampling_params import SamplingParams

# Of transformers 5.24: the first logits of the first position and of the last one, and the last
# one's sum.
TOKENS = [1, 5, 9, 13, 2, 7, 11, 3, 8, 4, 6, 10]
EXPECTED: dict[str, tuple[list[float], list[float], float]] = {
    "dense": (
        [0.09025, 0.51784, -0.23158, 0.70391],
        [1.64492, -0.16184, 0.76245, -0.56981, -0.34259, -0.14759],
        -1.9284,
    ),
    "per layer": (
        [-0.67285, 1.281, -0.8256, 0.258],
        [0.1052, 0.2258, 0.69999, -0.47657, -0.77676, -0.03491],
        4.9417,
    ),
    "experts": (
        [-0.49484, 0.87216, 0.23847, -1.41318],
        [0.83654, -0.04923, 0.66669, 0.55717, -0.04811, 0.50057],
        6.1576,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """test_families.py compares larger models in chunks and windows."""
    save_gemma4(tmp_path, kind)
    first, last, total = EXPECTED[kind]
    found = PagedRunner(load(tmp_path)).step({0: TOKENS})[0]
    torch.testing.assert_close(found[0, :4], torch.tensor(first), rtol=0, atol=1e-4)
    torch.testing.assert_close(found[-1, :6], torch.tensor(last), rtol=0, atol=1e-4)
    assert abs(found[-1].sum().item() - total) < 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"sliding_window": MAX_POSITIONS},
        {"rope_parameters": ROPES | {FULL: ROPES[FULL] | {"partial_rotary_factor": 0.75}}},
        {"final_logit_softcapping": 3.0},
        {"num_kv_shared_layers": 1},
    ],
    ids=lambda change: str(*change),
)
def test_the_reference_depends_on_what_is_compared(change: dict[str, Any], tmp_path: Path) -> None:
    tokens = random_tokens(MAX_POSITIONS, seed=3)
    found = [
        reference_logits(save_larger(tmp_path, "per layer", **each), tokens)
        for each in ({}, change)
    ]
    assert (found[0] - found[1]).abs()[-1].max() > 1e-2


def of_size(**config: Any) -> ModelConfig:
    """The configuration of a model with these keys of transformers' class."""
    raw = transformers.Gemma4TextConfig(**config).to_dict()
    return model_config_of(raw | {"architectures": ["Gemma4ForCausalLM"]})


def test_layers_of_a_kind_share_pages_and_those_without_keys_have_none() -> None:
    config = of_size(num_hidden_layers=12, num_kv_shared_layers=4, sliding_window=512)
    sliding, full = config.layer_groups(SINGLE_RANK)
    assert sliding.layers == (0, 1, 2, 3, 4, 6, 7) and full.layers == (5,)
    for group, size, span in ((sliding, 256, KeySpan(512, slides=True)), (full, 512, None)):
        geometry = group.geometry
        assert isinstance(geometry, AttentionGeometry)
        assert (geometry.head_dim, geometry.scale, geometry.span) == (size, 1.0, span)
        assert geometry.num_layers == len(group.layers)
    assert [config.kv_layer(layer) for layer in (7, 8, 10, 11)] == [7, 7, 7, 5]


def test_memory_is_divided_by_the_bytes_that_a_request_needs_of_each_group() -> None:
    """A full layer's page has the bytes of two sliding ones; a request needs few of the latter."""
    config = of_size(num_hidden_layers=12, num_key_value_heads=2, sliding_window=512)
    groups = own_groups(config.layer_groups(SINGLE_RANK), KVFormat(torch.bfloat16))
    page_bytes = [group.page_bytes(32) for group in groups]
    assert page_bytes == [10 * 2 * 32 * 2 * 256 * 2, 2 * 2 * 32 * 2 * 512 * 2]
    requests, needed = 50, [20, 256]
    budget = requests * sum(a * b for a, b in zip(page_bytes, needed, strict=True))
    found = divide(budget, page_bytes, needed, [0, 0], 10**6)
    assert found == [requests * pages for pages in needed]


def test_both_spellings_of_heads_give_the_same_config() -> None:
    newer = transformers.Gemma4TextConfig(**LARGER, **KINDS["dense"]).to_dict()
    assert set(newer.pop("per_layer_config")) == {"1", "3"}
    older = newer | {"global_head_dim": 32, "num_global_key_value_heads": 1}
    older["architectures"] = ["Gemma4ForCausalLM"]
    assert model_config_of(older) == of_size(**LARGER, **KINDS["dense"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"hidden_activation": "silu"}, "hidden_activation is 'silu'"),
    ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
    ({"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input is 64; it must be vocab_size"),
    ({"num_kv_shared_layers": 4}, "num_kv_shared_layers is 4 of 5 layers; a layer of each kind"),
    ({"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config is served where"),
    ({"global_head_dim": 15}, "head_dim of layers of full_attention is 15"),
    ({"num_global_key_value_heads": 3, "attention_k_eq_v": True}, "must divide num_attention_head"),
    ({"enable_moe_block": True, "top_k_experts": 2}, "config.json has no moe_intermediate_size"),
    (
        {"rope_parameters": {FULL: {"partial_rotary_factor": 0.5, "rope_theta": 9}}},
        "partial_rotary_factor is 0.5",
    ),
]


@pytest.mark.parametrize(("change", "problem"), REFUSED, ids=[each for _, each in REFUSED])
def test_what_is_not_served_is_refused_by_name(change: dict[str, Any], problem: str) -> None:
    raw = {"architectures": ["Gemma4ForCausalLM"], "hidden_size_per_layer_input": 6, **LARGER}
    raw |= {"num_hidden_layers": 5, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL]}
    model_config_of(raw)
    with pytest.raises(ValueError, match=problem):
        model_config_of(raw | change)


@pytest.mark.parametrize(
    ("architecture", "kind"), [*zip(TOWERS, ("per layer", "dense"), strict=True)]
)
def test_the_text_part_has_its_logits_and_one_line_names_what_is_left_out(
    architecture: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = random_tokens(40, seed=3)
    expected = reference_logits(save_with_towers(tmp_path, architecture, kind), tokens)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    torch.testing.assert_close(PagedRunner(model).step({0: tokens})[0], expected, rtol=0, atol=1e-4)
    names = ", ".join(sorted(TOWERS[architecture]))
    [line] = [text for text in caplog.messages if "left out" in text]
    assert line.endswith(f"only text is served: 3 tensors are left out, of {names}")
    with pytest.raises(ValueError, match=f"{architecture}, which also sees images"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_tensor_and_one_too_many_are_refused(kind: str, tmp_path: Path) -> None:
    save_larger(tmp_path, kind)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.0.self_attn.v_norm.weight": torch.ones(16)}, file)
    with pytest.raises(ValueError, match=r"missing none; surplus model\.layers\.0\.self_attn\.v_n"):
        load(tmp_path)
    name = "model.layers.1.layer_scalar"
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file)
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.layer_scalar; surplus none"):
        load(tmp_path)


def suppress(folder: Path, tokens: list[int]) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": tokens}))


def test_suppressed_tokens_never_follow_with_any_drafter(tmp_path: Path) -> None:
    save_larger(tmp_path)
    prompt, params = random_tokens(9), SamplingParams(max_tokens=20, temperature=1.5, seed=0)
    ngram = {"decoding_type": "NGram", "max_draft_len": 3}
    itself = {"decoding_type": "Draft_Target", "speculative_model": str(tmp_path)}
    itself |= {"max_draft_len": 2}

    def text(config: dict[str, Any] | None) -> list[int]:
        own = {"speculative_config": config, "max_seq_len": 60}
        with LLM(str(tmp_path), skip_tokenizer_init=True, **own) as llm:
            return llm.generate(prompt, params).outputs[0].token_ids

    usual = text(None)
    suppress(tmp_path, [*set(usual[:5])])
    plain = text(None)
    assert not set(usual[:5]) & set(plain)
    assert text(ngram) == text(itself) == plain


def test_each_rank_suppresses_its_own_tokens(tmp_path: Path) -> None:
    save_larger(tmp_path)
    suppress(tmp_path, [3, 70, 127])
    hidden = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))

    def hidden_tokens(communicator: Communicator) -> list[int]:
        model = load(tmp_path, communicator=communicator)
        shard = model.lm_head.shard
        assert shard is not None
        row = model.compute_logits(hidden)[0]
        return [token + shard.first for token in row.isinf().nonzero().flatten().tolist()]

    assert ThreadGroup().run(hidden_tokens) == [[3], [70, 127]]


def test_factors_of_dummy_weights_are_one(tmp_path: Path) -> None:
    save_larger(tmp_path, "experts")
    weights = dict(load(tmp_path, load_format="dummy").named_parameters())
    for name in (
        "layer_scalar",
        "router.scale",
        "router.per_expert_scale",
        "input_layernorm.weight",
    ):
        assert weights[f"model.layers.1.{name}"].eq(1).all()
    assert weights["model.layers.1.router.proj.weight"].std() > 0.1
