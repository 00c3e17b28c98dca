"""What a checkpoint says of an FP8 KV cache: the setting that asks for one, and the scales of its
layers.

| written by | setting | scales, below `model.layers.N.self_attn.` |
|---|---|---|
| ModelOpt | `kv_cache_quant_algo: FP8`, or `kv_cache_scheme` | `k_proj.k_scale`, `v_proj.v_scale` |
| llm-compressor | `kv_cache_scheme` | `k_scale`, `v_scale`, once `k_proj.output_scale` and so on |
| AutoFP8 | `kv_cache_scheme: static` | the same, once one `kv_scale` |
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tllm_spec.config.option_checks import shown
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales
from tllm_spec.models.checkpoint import checkpoint_tensors
from tllm_spec.models.formats.quantisation_readers import quantization_settings, unserved

_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
_SCHEME: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": ("tensor", None),
    "symmetric": (True, None),
    "dynamic": (False, None),
}
# Groups: the layer, and what the last parts of the name say.
_SCALE = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:\w+\.)?([kv]|kv)_scale|([kv])_proj\.output_scale)\Z"
)


@dataclass(frozen=True)
class KVCacheSetting:
    """A setting of the KV cache, such as `kv_cache_scheme`."""

    key: str
    why_not: str | None
    """Why it is not served; None: it asks for an FP8 cache with constant scales."""


def kv_cache_setting(path: Path | None, raw: Mapping[str, Any]) -> KVCacheSetting | None:
    """What the checkpoint in the folder `path` says, whose config.json is `raw`; None: nothing."""
    quantization, _, _ = quantization_settings(path, raw)
    if not isinstance(quantization, Mapping):
        return None
    settings = quantization.get("quantization") or quantization
    for key in _KEYS:
        value = settings.get(key)
        if str(value or "none").lower() != "none":
            return KVCacheSetting(key, _why_not(key, value))
    return None


def _why_not(key: str, value: Any) -> str | None:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}.{reason}" for reason in unserved(value, _SCHEME)) or None
    served = "static" if key == "kv_cache_scheme" else "fp8"
    if str(value).lower() == served:
        return None
    return f"{key} is {shown(value)} (served: {served!r})"


def read_kv_scales(
    path: Path, layers: Sequence[int], own_name: Callable[[str], str]
) -> tuple[KVScales, ...]:
    """The scales of the checkpoint's layers `layers`; 1.0 where there is none. One for keys only,
    or for both, is that of values, too.

    Args:
        path: the checkpoint's folder.
        layers: numbers in the names of tensors.
        own_name: the model's name for a tensor of the checkpoint.

    Raises:
        ValueError: a scale is not one positive number.
    """
    found: dict[int, dict[str, float]] = {}
    for name, tensor in checkpoint_tensors(path, lambda each: bool(_SCALE.match(own_name(each)))):
        match = _SCALE.match(own_name(name))
        assert match is not None
        kind = match[2] or match[3]
        found.setdefault(int(match[1]), {})[kind] = _number(name, tensor)
    return tuple(_scales_of(found.get(layer, {})) for layer in layers)


def _scales_of(found: Mapping[str, float]) -> KVScales:
    both = found.get("kv", UNSCALED.key)
    key = found.get("k", found.get("v", both))
    return KVScales(key, found.get("v", key))


def _number(name: str, tensor: torch.Tensor) -> float:
    number = float(tensor.float()) if tensor.numel() == 1 else 0.0
    if not 0 < number < float("inf"):
        raise ValueError(
            f"{name} has the shape {list(tensor.shape)} and the values {shown(tensor.tolist())}; "
            "an FP8 KV cache needs one positive number for a layer"
        )
    return number
