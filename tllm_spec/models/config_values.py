"""Values of a `config.json` that follow from several keys, or have several spellings."""

from typing import Any

import torch

from tllm_spec.models.config_file import required
from tllm_spec.models.phi3_config import PHI3

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_of(raw: dict[str, Any]) -> torch.dtype:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"dtype is {name!r}; accepted are {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def head_dim_of(raw: dict[str, Any]) -> int:
    hidden_size, num_heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    if not raw.get("head_dim") and hidden_size % num_heads:
        raise ValueError(
            f"hidden_size is {hidden_size}; without head_dim, it must be a multiple of "
            f"num_attention_heads, which is {num_heads}."
        )
    return int(raw.get("head_dim") or hidden_size // num_heads)


def token_ids_of(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def sliding_layers_of(raw: dict[str, Any], architecture: str) -> frozenset[int]:
    """The layers with a sliding window, as in transformers. Raises ValueError for a window without
    keys, and for `layer_types` of another number of layers."""
    window, layers = raw.get("sliding_window"), range(required(raw, "num_hidden_layers"))
    uses, types = raw.get("use_sliding_window"), raw.get("layer_types")
    if types and len(types) != len(layers):
        raise ValueError(f"layer_types has {len(types)} entries for {len(layers)} layers.")
    if not window or uses is False:
        return frozenset()
    if window < 1:
        raise ValueError(f"sliding_window is {window}; it must be at least 1.")
    if architecture in ("MistralForCausalLM", "MixtralForCausalLM", PHI3):
        return frozenset(layers)
    if types:
        return frozenset(layer for layer in layers if types[layer] == "sliding_attention")
    if not uses:
        return frozenset()
    if architecture == "Qwen3MoeForCausalLM":
        return frozenset(layers)
    num_before = raw.get("max_window_layers")
    num_before = 28 if num_before is None else num_before
    if architecture == "Qwen2MoeForCausalLM":
        return frozenset(layers[:num_before:2])
    return frozenset(layers[num_before:])
