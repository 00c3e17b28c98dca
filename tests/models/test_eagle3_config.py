"""The config.json of an EAGLE-3 head: the published formats are read, and what is not served is
named."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.tiny_llama import write_tiny_llama
from tests.models.eagle3_runner import load_head
from tests.models.helpers import load
from tests.models.tiny_eagle3 import edit_config, rewrite, write_tiny_eagle3
from tllm_spec.attention.geometry import AttentionGeometry
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.draft_head import MASK_TOKENS
from tllm_spec.models.eagle3_config import Eagle3Config
from tllm_spec.models.llama import CausalLM


@pytest.fixture
def target(tmp_path: Path) -> CausalLM:
    return load(write_tiny_llama(tmp_path / "target", num_layers=6))


CONFIG_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "target_hidden_size": (
        {"target_hidden_size": 40},
        "target_hidden_size of .* is 40, the target's is 32",
    ),
    "vocab_size": (
        {"vocab_size": 128, "draft_vocab_size": 128},
        "vocab_size of the EAGLE-3 head is 128, the target's is 64",
    ),
    "large draft vocabulary": ({"draft_vocab_size": 65}, "draft_vocab_size is 65; .*, which is 64"),
    "no draft vocabulary": (
        {"draft_vocab_size": 0},
        "draft_vocab_size is 0; it must be 1 to vocab_size",
    ),
    "architecture": (
        {"architectures": ["Eagle3Speculator"]},
        r"\['Eagle3Speculator'\]; .*LlamaForCausalLMEagle3.*speculators_model_type",
    ),
    "no architecture": ({"architectures": None}, r"architectures of the EAGLE-3 head is \[\]"),
    "no aux states": (
        {"eagle_config": {"use_aux_hidden_state": False}},
        "EAGLE-3 head: use_aux_hidden_state is False, and only True is served",
    ),
    "layer ids": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}},
        "3 layers of the target are captured; the EAGLE-3 head reads 2 "
        ".eagle_aux_hidden_state_layer_ids",
    ),
    "number of states": (
        {"num_aux_hidden_states": 4},
        "the EAGLE-3 head reads 4 .num_aux_hidden_states",
    ),
    "layers": ({"layer_types": ["linear_attention"]}, r"layer_types has \['linear_attention'\]"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantized checkpoints are not served"),
    "FP8": ({"quantization_config": {"quant_method": "fp8"}}, "The EAGLE-3 head has FP8 weights"),
    "4 bits": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        "The EAGLE-3 head has 4-bit weights",
    ),
    "no mask": ({"parallel_drafting": True}, "parallel_drafting is true .* has no mask token; .*"),
    "a mask that is off": (
        {"parallel_drafting": False, "pard_token": 5},
        "the mask token 5, and parallel_drafting is false",
    ),
    "a mask outside": ({"mask_token_id": 64}, "mask token of the head is 64; .* 0 to 63"),
    "parallel steps": (
        {"eagle_config": {"parallel_draft_step": 4}},
        "parallel_draft_step is 4, and only 1 is served",
    ),
    "a scale": ({"embedding_multiplier": 7}, "embedding_multiplier is 7, which is not served; del"),
    "a scale in eagle_config": (
        {"eagle_config": {"residual_multiplier": 7}},
        "residual_multiplier is 7, which is not served",
    ),
    "two vocabularies": (
        {"truncated_vocab_size": 32},
        "draft_vocab_size of the EAGLE-3 head is 48 and truncated_vocab_size is 32; .* equal",
    ),
    "inputs and outputs": (
        {
            "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
        },
        r"\[1, 2, 3\] at the top level, .* and \[0, 1, 2\] in eagle_config",
    ),
    "the embedding's output": (
        {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
        r"\[0, 2, 3\]; 0, the target's embedding, is not served",
    ),
    "no vocab_size": ({"vocab_size": None}, r"config\.json has no vocab_size"),
}


@pytest.mark.parametrize("name", CONFIG_ERRORS)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_what_is_not_served_or_does_not_fit_the_target_is_named(
    name: str, load_format: str, target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head")
    changes, message = CONFIG_ERRORS[name]
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_head(folder, target, load_format=load_format)


def test_a_published_config_is_read() -> None:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    config = Eagle3Config.from_dict(raw)
    assert config.layer_groups(Mapping())[0].geometry == AttentionGeometry(1, 32, 8, 128, 128**-0.5)
    assert (config.draft_vocab_size, config.target_hidden_size, config.rope.theta) == (
        32000,
        4096,
        10000.0,
    )
    assert config.capture_layers is None
    assert not (config.norm_output or config.fc_norm or config.bias)


@pytest.mark.parametrize(("ids", "layers"), [([1, 15, 28], (1, 15, 28)), ([], None), (None, None)])
def test_layers_to_capture_are_those_of_the_eagle_config(
    ids: list[int] | None, layers: tuple[int, ...] | None, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    assert Eagle3Config.from_pretrained(folder).capture_layers == layers


@pytest.mark.parametrize(("ids", "layers"), [([2, 16, 29], (1, 15, 28)), ([], None), (None, None)])
@pytest.mark.parametrize("speculators", [True, False])
def test_layer_ids_at_the_top_level_count_the_states_that_enter_layers(
    ids: list[int] | None, layers: tuple[int, ...] | None, speculators: bool, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(
        tmp_path, speculators=speculators, eagle_aux_hidden_state_layer_ids=ids
    )
    assert Eagle3Config.from_pretrained(folder).capture_layers == layers


def test_flags_in_eagle_config_count_like_those_at_the_top_level(tmp_path: Path) -> None:
    flags = {"norm_before_fc": True, "next_layer_regular": True, "parallel_draft_step": None}
    folder = write_tiny_eagle3(tmp_path, eagle_config=flags)
    assert Eagle3Config.from_pretrained(folder).norm_before_fc


@pytest.mark.parametrize(
    ("draft", "truncated", "size"),
    [(None, 48, 48), (48, 48, 48), (48, 64, 48), (48, None, 48), (None, 64, None)],
)
def test_truncated_vocab_size_is_another_name_of_draft_vocab_size(
    draft: int | None, truncated: int | None, size: int | None, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path, draft_vocab_size=draft, truncated_vocab_size=truncated)
    assert Eagle3Config.from_pretrained(folder).draft_vocab_size == size


def test_keys_that_are_off_or_without_effect_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path)
    expected = Eagle3Config.from_pretrained(folder)
    edit_config(folder, initializer_range=0.02, transformers_version="4.55.2", logit_scale=1.0)
    edit_config(folder, gate_width=None, use_gate=False, gates=[], parallel_drafting=False)
    assert Eagle3Config.from_pretrained(folder) == expected


def test_unknown_keys_are_named_and_change_nothing(tmp_path: Path) -> None:
    """Trainers copy them from the target's config.json."""
    folder = write_tiny_eagle3(tmp_path, eagle_config={"training_mode": "fast"})
    expected = Eagle3Config.from_pretrained(folder)
    edit_config(folder, decoder_sparse_step=1, router_aux_loss_coef=0.001, num_experts=4)
    edit_config(folder, modal_type="VLM", image_token_id=5, rope_scaling={"mrope_section": [4, 4]})
    found = Eagle3Config.from_pretrained(folder)
    assert found == expected
    assert found.unknown_keys == (
        *("decoder_sparse_step", "image_token_id", "modal_type", "num_experts"),
        *("router_aux_loss_coef", "training_mode"),
    )


def test_all_that_is_not_served_is_named_at_once(tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path, use_last_layernorm=False, clip_qkv=5, logit_scale=0.5)
    named = r"use_last_layernorm is False.*logit_scale is 0\.5, and only 1\.0.*clip_qkv is 5"
    with pytest.raises(ValueError, match=named):
        Eagle3Config.from_pretrained(folder)


@pytest.mark.parametrize("name", MASK_TOKENS)
def test_every_name_of_the_mask_token_makes_a_p_eagle_head(name: str, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path, parallel_drafting=True, **{name: 5})
    assert Eagle3Config.from_pretrained(folder).mask_token == 5


def test_a_p_eagle_head_without_mask_hidden_is_refused(target: CausalLM, tmp_path: Path) -> None:
    folder = write_tiny_eagle3(tmp_path, mask_token=5)
    rewrite(folder, lambda tensors: tensors.pop("mask_hidden"))
    with pytest.raises(ValueError, match=r"missing mask_hidden"):
        load_head(folder, target)


SPECULATORS_ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "another algorithm": (
        {"speculators_model_type": "mlp"},
        "speculators_model_type is 'mlp'; served are 'eagle3' and 'peagle'",
    ),
    "no mask": ({"speculators_model_type": "peagle"}, "EAGLE-3 head has no mask_token_id"),
    "no layer": ({"transformer_layer_config": None}, "transformer_layer_config .* a JSON object"),
    "another layer": (
        {"transformer_layer_config": {"model_type": "deepseek_v3"}},
        "model_type .* is 'deepseek_v3'; served are llama, qwen3",
    ),
    "no draft vocabulary": ({"draft_vocab_size": None}, "EAGLE-3 head has no draft_vocab_size"),
    "no residual": ({"norm_before_residual": None}, "EAGLE-3 head has no norm_before_residual"),
    "a scale": ({"scale_emb": 7}, "scale_emb is 7, which is not served"),
}


@pytest.mark.parametrize("name", SPECULATORS_ERRORS)
def test_a_speculators_config_that_is_not_served_is_named(name: str, tmp_path: Path) -> None:
    changes, message = SPECULATORS_ERRORS[name]
    edit_config(write_tiny_eagle3(tmp_path, speculators=True), **changes)
    with pytest.raises(ValueError, match=message):
        Eagle3Config.from_pretrained(tmp_path)


def test_a_published_speculators_config_is_read() -> None:
    """The keys of a published head for Llama 3.1 8B."""
    raw = {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "has_no_defaults_at_init": False,
        "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev14",
        "target_hidden_size": None,
        "torch_dtype": "float32",
        "transformer_layer_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 2048,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 1,
            "num_key_value_heads": 8,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": 128256,
        },
        "transformers_version": "4.53.2",
    }
    config = Eagle3Config.from_dict(raw)
    assert config.layer_groups(Mapping())[0].geometry == AttentionGeometry(1, 32, 8, 128, 128**-0.5)
    assert (config.draft_vocab_size, config.vocab_size) == (32000, 128256)
    assert config.target_hidden_size == 4096 and config.has_own_lm_head
    assert config.norm_before_residual and config.capture_layers is None
    assert not (config.norm_output or config.norm_before_fc or config.fc_norm or config.bias)


@pytest.mark.parametrize("names_it", [True, False])
def test_a_head_of_another_width_needs_its_own_embedding_and_output_layer(
    names_it: bool, target: CausalLM, tmp_path: Path
) -> None:
    """Whether or not config.json names the width of the target's states."""
    sizes = {"hidden_size": 48, "target_hidden_size": 32, "draft_vocab_size": None}
    folder = write_tiny_eagle3(tmp_path / "head", own_modules=True, **sizes)
    rows = torch.randn(64, 48)
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": rows}))
    if not names_it:
        edit_config(folder, target_hidden_size=None)
    assert torch.equal(load_head(folder, target).output.weight, rows)
    dummy = load_head(folder, target, load_format="dummy")
    assert dummy.embedding.weight.shape == dummy.output.weight.shape == (64, 48)
    for name in ("lm_head.weight", "embed_tokens.weight"):
        rewrite(folder, lambda tensors, name=name: tensors.pop(name))
        with pytest.raises(ValueError, match=rf"is 48, the target's is 32; .* own .*{name}"):
            load_head(folder, target)


def test_a_tied_head_of_fewer_tokens_without_an_output_layer_is_refused(
    target: CausalLM, tmp_path: Path
) -> None:
    folder = write_tiny_eagle3(tmp_path / "head", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"draft_vocab_size is 48; .* has no lm_head\.weight"):
        load_head(folder, target)
    head = load_head(folder, target, load_format="dummy")
    assert len(head.output.weight) == 48
