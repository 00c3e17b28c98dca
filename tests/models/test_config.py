"""config.json: both spellings, defaults of missing keys, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.helpers import load, save_checkpoint
from tests.models.published import LLAMA3_ROPE, LLAMA_31_8B
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.registry import model_config

OLD = LLAMA_31_8B | {"bos_token_id": 128000, "head_dim": 128, "transformers_version": "4.55.0"}
NEW = {
    key: value
    for key, value in OLD.items()
    if key not in ("rope_scaling", "rope_theta", "torch_dtype")
} | {
    "dtype": "bfloat16",
    "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0},
    "transformers_version": "5.0.0",
}


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return model_config(folder)


def test_both_spellings_of_transformers_give_the_same_config(tmp_path: Path) -> None:
    old, new = read(tmp_path, OLD), read(tmp_path, NEW)
    assert old == new
    assert (old.rope.kind, old.rope.theta, old.rope.factor) == ("llama3", 500000.0, 8.0)
    assert old.rope.original_max_positions == 8192
    assert (old.dtype, old.eos_token_ids, old.head_dim) == (
        torch.bfloat16,
        (128001, 128008, 128009),
        128,
    )


def test_the_oldest_spelling_of_a_rope_type_is_read(tmp_path: Path) -> None:
    rope = read(tmp_path, OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}}).rope
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 500000.0)


def test_generation_config_names_further_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 128009]}')
    assert read(tmp_path, OLD).eos_token_ids == (128001, 128008, 128009, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert read(tmp_path, OLD | {"eos_token_id": 5}).eos_token_ids == (5,)


def test_yarn_without_a_factor_uses_the_ratio_of_the_lengths(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 32768}
    assert read(tmp_path, OLD | {"rope_scaling": yarn}).rope.factor == 4.0


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"type": "linear", "factor": 2.5}, 160),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
        (LLAMA3_ROPE, 64),
        (None, 64),
    ],
)
def test_a_scaled_rotary_embedding_serves_its_factor_times_the_original_length(
    rope: dict[str, Any] | None, positions: int, tmp_path: Path
) -> None:
    change = {"rope_scaling": rope, "max_position_embeddings": 64}
    assert read(tmp_path, OLD | change).max_positions == positions


REFUSED = {
    "architecture": (
        {"architectures": ["GemmaForCausalLM"]},
        "GemmaForCausalLM.*one of LlamaForCausalLM",
    ),
    "missing size": ({"hidden_size": None}, "no hidden_size"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'.*silu"),
    "quantized": ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    "dtype": ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'.*bfloat16"),
    "heads": ({"num_key_value_heads": 5}, "num_key_value_heads is 5.*32"),
    "width": ({"hidden_size": 4097, "head_dim": None}, "hidden_size is 4097.*heads, which is 32"),
    "dynamic rope": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope_type is 'dynamic'.*yarn",
    ),
    "half a rope": (
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        "needs low_freq_factor and high",
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "rope by layer": ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "layer type"),
    "layer types": (
        {"layer_types": ["linear_attention"]},
        "linear_attention'.*; served are 'full_attention' and 'sliding_attention'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, OLD | change)


def test_a_missing_or_broken_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not readable JSON"):
        model_config(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "change", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 4096, "use_sliding_window": False}, None),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 32},
            None,
        ),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 31},
            4096,
        ),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "layer_types": ["full_attention"] * 32}, None),
        ("Qwen3ForCausalLM", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 32}, 64),
    ],
)
def test_the_sliding_window_is_set_only_if_a_layer_uses_it(
    architecture: str, change: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    assert read(tmp_path, OLD | {"architectures": [architecture]} | change).sliding_window == window


def test_a_sliding_window_costs_nothing_where_no_position_is_beyond_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "Mistral", sliding_window=32)
    assert load(tmp_path, max_positions=32).config.sliding_window is None
    assert load(tmp_path, max_positions=33).config.sliding_window == 32


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sliding_window": -1}, "sliding_window is -1; it must be an integer from 0"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 32 layers"),
    ],
)
def test_a_window_that_cannot_be_is_refused_by_key_and_value(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path, OLD | {"architectures": ["MistralForCausalLM"]} | change)
