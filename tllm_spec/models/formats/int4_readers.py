"""Reads what config.json says of 4-bit weights, and refuses what is not served."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.models.config_file import read_json
from tllm_spec.models.formats.fp8_formats import ModuleNames
from tllm_spec.models.formats.fp8_readers import (
    module_names,
    quantization_settings,
    target_names,
    unserved,
    wrong_types,
)
from tllm_spec.models.formats.gguf_tensors import Q4_0, Q4_0_GROUP, gguf_names
from tllm_spec.models.formats.int4_formats import Int4Format, Int4Groups, Packing
from tllm_spec.zoo.registry import is_gguf

GPTQ_FILE = "quantize_config.json"
_SIZES = (32, 64, 128)
_PACKED, _MXFP4, _NVFP4 = "pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_SERVED = (
    "Of checkpoints with integer weights those of 4 bits in groups of "
    f"{', '.join(map(str, _SIZES))} inputs or whole rows are served: quant_method 'awq', 'gptq', "
    f"and 'compressed-tensors' in the format {_PACKED!r}; also MXFP4, in its format {_MXFP4!r}, "
    f"NVFP4, in its format {_NVFP4!r} and as ModelOpt's quant_algo 'NVFP4'; and gpt-oss's experts "
    "with quant_method 'mxfp4'."
)


def int4_format(path: Path | None, raw: Mapping[str, Any]) -> Int4Format | None:
    """The format of the checkpoint in the folder `path`, whose config.json is `raw`; None: its
    weights are not quantised, or described otherwise. Without `path`, config.json alone counts.

    Raises:
        ValueError: it is in one of these formats in a way that is not served; all reasons are
            named.
    """
    if path is not None and is_gguf(path):
        has_codes = bool(gguf_names(path, Q4_0))
        groups = Int4Groups(Q4_0_GROUP)
        return Int4Format(groups, "gguf", ModuleNames()) if has_codes else None
    settings, source, method = quantization_settings(path, raw)
    if settings is None and path is not None and (path / GPTQ_FILE).is_file():
        settings, source = {"quant_method": "gptq"} | read_json(path / GPTQ_FILE), GPTQ_FILE
    if not isinstance(settings, Mapping):
        return None
    reader = _READERS.get(method or str(settings.get("quant_method")))
    if reader is None or not _is_4_bit(settings, reader):
        return None
    if wrong := wrong_types(settings):
        raise ValueError(f"{source}: {'; '.join(wrong)}. {_SERVED}")
    reasons: list[str] = []
    found = reader(settings, reasons)
    if reasons:
        raise ValueError(f"{source}: {'; '.join(reasons)}. {_SERVED}")
    return found


def _group_size(settings: Mapping[str, Any], key: str, reasons: list[str]) -> int:
    """0 for whole rows, which the checkpoints call -1."""
    size = settings.get(key)
    if size == -1:
        return 0
    if size not in _SIZES:
        reasons.append(f"{key} is {shown(size)} (served: {', '.join(map(str, _SIZES))} or -1)")
        return 0
    return int(size)


def _read_awq(settings: Mapping[str, Any], reasons: list[str]) -> Int4Format:
    """Where a setting has two names, AutoAWQ's own file has the second."""
    bits = "w_bit" if "w_bit" in settings else "bits"
    reasons += unserved(settings, {bits: (4,)})
    version = str(settings.get("version", "gemm")).lower()
    reasons += unserved({"version": version}, {"version": ("gemm",)})
    key = "q_group_size" if "q_group_size" in settings else "group_size"
    size = _group_size(settings, key, reasons)
    listed = list(settings.get("modules_to_not_convert") or ())
    ignored = module_names(listed, "ignored modules", reasons)
    is_symmetric = None if settings.get("zero_point", True) else True
    return Int4Format(Int4Groups(size), "awq", ignored, is_symmetric=is_symmetric)


def _read_gptq(settings: Mapping[str, Any], reasons: list[str]) -> Int4Format:
    reasons += unserved(settings, {"bits": (4,), "is_marlin_format": (False, None)})
    key = "checkpoint_format" if settings.get("checkpoint_format") else "format"
    reasons += unserved(settings, {key: ("gptq", "gptq_v2", None)})
    size = _group_size(settings, "group_size", reasons)
    is_ordered = bool(settings.get("desc_act")) and size > 0
    listed = [*_skipped(settings, reasons), *(settings.get("modules_to_not_convert") or ())]
    ignored = module_names(listed, "ignored modules", reasons)
    packing: Packing = "gptq_v2" if settings.get(key) == "gptq_v2" else "gptq"
    groups, sym = Int4Groups(size, is_ordered), settings.get("sym")
    is_symmetric = None if sym is None else bool(sym)
    return Int4Format(groups, packing, ignored, is_symmetric=is_symmetric)


def _skipped(settings: Mapping[str, Any], reasons: list[str]) -> Iterator[str]:
    """GPTQModel's `dynamic` has settings of single modules by regular expressions: only those that
    leave a module out, which start with `-:`."""
    for expression in settings.get("dynamic") or {}:
        if str(expression).startswith("-:"):
            yield f"re:{expression[2:]}"
        else:
            reasons.append(f"dynamic has other settings for {shown(expression)} (served: '-:')")


def _is_4_bit(settings: Mapping[str, Any], reader: "Reader") -> bool:
    """Whether formats that may also be FP8 have 4 bits."""
    if reader is _read_modelopt:
        return _modelopt(settings).get("quant_algo") == "NVFP4"
    return reader is not _read_compressed or _written(settings) is not None


def _written(settings: Mapping[str, Any]) -> str | None:
    """The format of compressed-tensors, if it has 4 bits. Groups may have it, too."""
    groups = settings.get("config_groups")
    own = groups.values() if isinstance(groups, Mapping) else ()
    formats = [group.get("format") for group in own if isinstance(group, Mapping)]
    found = (name for name in map(str, [settings.get("format"), *formats]) if name in _FORMATS)
    return next(found, None)


def _read_compressed(settings: Mapping[str, Any], reasons: list[str]) -> Int4Format:
    sparsity = settings.get("sparsity_config") or {}
    reasons += unserved(settings, {"transform_config": ({}, None)})
    reasons += [f"sparsity_config: {r}" for r in unserved(sparsity, {"format": ("dense", None)})]
    groups = list((settings.get("config_groups") or {}).values())
    if len(groups) != 1:
        reasons.append(f"config_groups has {len(groups)} groups (served: 1)")
    written = str(_written(settings))
    packing, of_weights = _FORMATS[written]
    targets, size, actorder, unused = None, 0, None, tuple[str, ...]()
    for group in groups[:1]:
        reasons += unserved(group, {"format": (written, None)})
        if group.get("input_activations") and written == _NVFP4:
            unused = (UNUSED_ACTIVATIONS,)
        else:
            reasons += unserved(group, {"input_activations": (None,)})
        if (names := target_names(group, reasons)) is not None:
            targets = module_names(names, "targets", reasons)
        weights = group.get("weights") or {}
        actorder = weights.get("actorder")
        reasons += unserved(weights, _COMPRESSED | of_weights)
        if written == _NVFP4:
            size = NVFP4_GROUP
        elif weights.get("strategy") == "group":
            size = _group_size(weights, "group_size", reasons)
    ignored = module_names(list(settings.get("ignore") or ()), "ignored modules", reasons)
    is_ordered = actorder in ("group", True) and size > 0
    own = Int4Groups(size, is_ordered, written != _PACKED)
    return Int4Format(own, packing, ignored, targets, unused=unused)


def _modelopt(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """ModelOpt's own file nests the settings."""
    nested = settings.get("quantization")
    return nested if isinstance(nested, Mapping) else settings


def _read_modelopt(settings: Mapping[str, Any], reasons: list[str]) -> Int4Format:
    """Activations are quantised, too, there; here they are not."""
    settings = _modelopt(settings)
    served: dict[str, tuple[Any, ...]] = {"group_size": (NVFP4_GROUP, None)}
    served |= {"quantized_layers": ({}, None), "pre_quant_scale": (False, None)}
    reasons += unserved(settings, served)
    listed = [*(settings.get("exclude_modules") or ()), *(settings.get("ignore") or ())]
    ignored = module_names(listed, "ignored modules", reasons)
    groups = Int4Groups(NVFP4_GROUP, is_float=True)
    return Int4Format(groups, "modelopt", ignored, unused=(UNUSED_ACTIVATIONS,))


NVFP4_GROUP = 16
UNUSED_ACTIVATIONS = "activations of NVFP4 are not quantised (W4A16)"


def _read_mxfp4(settings: Mapping[str, Any], reasons: list[str]) -> Int4Format:
    listed = list(settings.get("modules_to_not_convert") or ())
    ignored = module_names(listed, "ignored modules", reasons)
    experts = module_names(["*.experts"], "targets", reasons)
    return Int4Format(Int4Groups(32, is_float=True), "mxfp4_experts", ignored, experts)


# The settings of weights. Of `actorder` only "group", once called true, changes what is stored.
_COMPRESSED: dict[str, tuple[Any, ...]] = {
    "type": ("int",),
    "num_bits": (4,),
    "strategy": ("group", "channel"),
    "symmetric": (True, False, None),
    "dynamic": (False, None),
    "actorder": (None, "group", "static", "weight", "dynamic", True, False),
}
# What is different with MXFP4, and with NVFP4.
_FLOAT: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "strategy": ("group",),
    "group_size": (32,),
    "symmetric": (True, None),
    "actorder": (None, False),
}
_FLOAT_OF_16 = _FLOAT | {"strategy": ("tensor_group", "group"), "group_size": (NVFP4_GROUP,)}
_FORMATS: dict[str, tuple[Packing, dict[str, tuple[Any, ...]]]] = {
    _PACKED: ("compressed", {}),
    _MXFP4: ("mxfp4", _FLOAT),
    _NVFP4: ("nvfp4", _FLOAT_OF_16),
}
Reader = Callable[[Mapping[str, Any], list[str]], Int4Format]
_READERS: dict[str, Reader] = {
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
