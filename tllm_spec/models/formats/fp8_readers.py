"""Reads what config.json and ModelOpt's file say of FP8 weights, and refuses what is not served."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.models.checkpoint import checkpoint_names
from tllm_spec.models.config_file import read_json
from tllm_spec.models.formats.fp8_formats import (
    BLOCK,
    ActivationScales,
    Fp8Format,
    Granularity,
    ModuleNames,
)

MODELOPT_FILE = "hf_quant_config.json"
# Keys of config.json; the second is from early versions of compressed-tensors.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_SERVED = (
    "Of quantized checkpoints those with FP8 (E4M3) weights and one scale for a tensor, a row or a "
    f"block of {BLOCK} x {BLOCK} are served: quant_method 'fp8', 'fbgemm_fp8', "
    "'compressed-tensors' of linear layers, and ModelOpt's quant_algo 'FP8', "
    "'FP8_PER_CHANNEL_PER_TOKEN' and 'FP8_PB_WO'; and those with 4-bit integers: quant_method "
    "'awq', 'gptq', and 'compressed-tensors' in the format 'pack-quantized'; also MXFP4 and NVFP4; "
    "other quantized checkpoints are not served."
)


def fp8_format(path: Path | None, raw: Mapping[str, Any]) -> Fp8Format | None:
    """The format of the checkpoint in the folder `path`, whose config.json is `raw`; None: its
    weights are not quantized. Without `path`, config.json alone counts. ModelOpt's own file comes
    before config.json, which may still describe the model that it was made from.

    Raises:
        ValueError: it is quantized in a way that is not served; all reasons are named.
    """
    quantization, source, method = quantization_settings(path, raw)
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise ValueError(f"{source} is {shown(quantization)}; it must be an object. {_SERVED}")
    method = method or quantization.get("quant_method") or _producer(quantization)
    reader = _READERS.get(str(method))
    if reader is None:
        raise ValueError(f"{source}: quant_method is {method!r}. {_SERVED}")
    if wrong := wrong_types(quantization):
        raise ValueError(f"{source}: {'; '.join(wrong)}. {_SERVED}")
    read = reader(quantization)
    reasons = read.reasons
    ignored = module_names(read.ignored, "ignored modules", reasons)
    targets = None
    if read.targets is not None:
        targets = module_names(read.targets, "targets", reasons)
    if reasons:
        raise ValueError(f"{source}: {'; '.join(reasons)}. {_SERVED}")
    default = "_scale_inv" if method == "fp8" and read.granularity == "block" else "_scale"
    suffix = _scale_suffix(path, default)
    return Fp8Format(read.granularity, suffix, ignored, targets, read.activations, read.unused)


def quantization_settings(path: Path | None, raw: Mapping[str, Any]) -> tuple[Any, str, str | None]:
    """What describes the quantisation, which file it is from, and the `quant_method` that this file
    stands for."""
    if path is not None and (path / MODELOPT_FILE).is_file():
        return read_json(path / MODELOPT_FILE), MODELOPT_FILE, "modelopt"
    found = next((raw[key] for key in QUANTIZATION_KEYS if raw.get(key)), None)
    return found, "quantization_config of config.json", None


_OBJECTS = ("config_groups", "input_activations", "quantization", "sparsity_config", "weights")
_LISTS = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert", "targets")


def wrong_types(settings: Mapping[str, Any], prefix: str = "") -> list[str]:
    """A reason for each setting, also in objects below, that must be an object or a list of names
    and is something else."""
    reasons = []
    for key, value in settings.items():
        is_object = key in _OBJECTS or prefix == "config_groups."
        if is_object and isinstance(value, Mapping):
            reasons += wrong_types(value, f"{prefix}{key}.")
        elif is_object and (value is not None or prefix == "config_groups."):
            reasons.append(f"{prefix}{key} is {shown(value)} (it must be an object)")
        elif key in _LISTS and value is not None and not _is_list_of_names(value):
            reasons.append(f"{prefix}{key} is {shown(value)} (it must be a list of names)")
    return reasons


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _producer(quantization: Mapping[str, Any]) -> Any:
    """Early versions of ModelOpt name themselves here instead of in `quant_method`."""
    producer = quantization.get("producer")
    return producer.get("name") if isinstance(producer, Mapping) else None


def _scale_suffix(path: Path | None, default: str) -> str:
    """As the checkpoint has it: `weight_scale_inv` and `weight_scale` both occur with ModelOpt's
    blocks, with `quant_method: fp8` for a tensor, and in requantised copies of both."""
    for name in checkpoint_names(path) if path is not None else ():
        for suffix in ("_scale_inv", "_scale"):
            if name.endswith(f".weight{suffix}"):
                return suffix
    return default


def module_names(entries: list[str], what: str, reasons: list[str]) -> ModuleNames:
    """Entries as names and patterns; to `reasons` those patterns are added that are not valid.
    After `re:` is a regular expression; `*` stands for any characters, and a module that matches
    is meant with all below it."""
    names, patterns = [], []
    for entry in entries:
        if not entry.startswith("re:") and "*" not in entry:
            names.append(entry)
            continue
        any_characters = ".*".join(map(re.escape, entry.split("*"))) + r"(\..*)?\Z"
        expression = entry[3:] if entry.startswith("re:") else any_characters
        try:
            patterns.append(re.compile(expression))
        except re.error as error:
            reasons.append(f"{entry!r} among the {what} is no regular expression ({error})")
    return ModuleNames(frozenset(names), tuple(patterns))


@dataclass(frozen=True)
class _Read:
    """What a reader has found."""

    granularity: Granularity
    ignored: list[str]
    reasons: list[str]
    """Why it is not served."""
    targets: list[str] | None = None
    """The modules with FP8 weights; None: all linear layers that are not ignored."""
    activations: ActivationScales | None = None
    """None: not quantised, or in a way that `unused` names."""
    unused: tuple[str, ...] = ()
    """What is said of activations without an effect."""


# One dynamic scale a tensor counts as one a token: that of a batch would let requests change each
# other's text.
BY_TOKEN, STATIC = ActivationScales("token"), ActivationScales("tensor")
# At most the KV cache is quantised. Its scales are left out, as in any FP8 checkpoint.
_NO_WEIGHTS = ["*"]


def unserved(settings: Mapping[str, Any], served: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """A reason for each setting that has none of the values that are served."""
    return [
        f"{key} is {settings.get(key)!r} (served: {' or '.join(map(repr, values))})"
        for key, values in served.items()
        if settings.get(key) not in values
    ]


def _read_fp8(quantization: Mapping[str, Any]) -> _Read:
    reasons = unserved(
        quantization,
        {
            "weight_block_size": ([BLOCK, BLOCK], None),
            "fmt": ("e4m3", None),
            # Powers of 2. In float32 they are like any others.
            "scale_fmt": ("float", "ue8m0", None),
            "expert_dtype": ("fp8", None),
            "modules_to_convert": ([], None),
            "activation_scheme": ("dynamic", "static", None),
        },
    )
    ignored = [
        *(quantization.get("modules_to_not_convert") or ()),
        *(quantization.get("ignored_layers") or ()),
    ]
    is_static = quantization.get("activation_scheme") == "static"
    if quantization.get("weight_block_size"):
        if is_static:
            reasons.append("activation_scheme is 'static' (with weight_block_size: 'dynamic')")
        return _Read("block", ignored, reasons, activations=ActivationScales("block"))
    return _Read("tensor", ignored, reasons, activations=STATIC if is_static else BY_TOKEN)


def _read_fbgemm(quantization: Mapping[str, Any]) -> _Read:
    """One scale a token, up to a bound."""
    bound, reasons = quantization.get("activation_scale_ub"), list[str]()
    if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
        reasons.append(f"activation_scale_ub is {bound!r} (it must be a number above 0)")
        bound = None
    ignored = list(quantization.get("modules_to_not_convert") or ())
    return _Read("row", ignored, reasons, activations=ActivationScales(bound=bound))


_STRATEGIES: dict[str, Granularity] = {"tensor": "tensor", "channel": "row", "block": "block"}
# Both store FP8 in the same way.
_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")
_COMPRESSED_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": tuple(_STRATEGIES),
    "symmetric": (True, None),
    "dynamic": (False, None),
}


_ACTIVATIONS: dict[str, tuple[Any, ...]] = {
    "type": ("float",),
    "num_bits": (8,),
    "symmetric": (True, None),
}


def _group_activations(group: Mapping[str, Any]) -> ActivationScales | None:
    """None: they are not quantised, or not as it is served."""
    settings = group.get("input_activations") or {}
    if unserved(settings, _ACTIVATIONS):
        return None
    strategy, dynamic = settings.get("strategy"), settings.get("dynamic") or False
    if strategy == "group" and dynamic is True and settings.get("group_size") == BLOCK:
        return ActivationScales("block")
    if strategy in ("token", "tensor") and dynamic is True:
        return BY_TOKEN
    return STATIC if strategy == "tensor" and dynamic is False else None


def _read_compressed_tensors(quantization: Mapping[str, Any]) -> _Read:
    sparsity = quantization.get("sparsity_config") or {}
    reasons = unserved(quantization, {"transform_config": ({}, None)})
    reasons += [f"sparsity_config: {r}" for r in unserved(sparsity, {"format": ("dense", None)})]
    groups = list((quantization.get("config_groups") or {}).values())
    if not groups and quantization.get("kv_cache_scheme"):
        return _Read("tensor", _NO_WEIGHTS, reasons)
    reasons += unserved(quantization, {"format": _COMPRESSED_FORMATS})
    if len(groups) != 1:
        reasons.append(f"config_groups has {len(groups)} groups (served: 1)")
    ignored, targets = list(quantization.get("ignore") or ()), None
    strategy, activations, unused = None, None, tuple[str, ...]()
    for group in groups[:1]:
        reasons += unserved(group, {"format": (*_COMPRESSED_FORMATS, None)})
        targets = target_names(group, reasons)
        weights = group.get("weights") or {}
        strategy = weights.get("strategy")
        reasons += unserved(weights, _COMPRESSED_WEIGHTS)
        if strategy == "block":
            shapes = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
            reasons += unserved(weights, {"block_structure": shapes})
        activations = _group_activations(group)
        if group.get("input_activations") and activations is None:
            unused = (
                "input_activations of config_groups is not used: activations are not quantised "
                "(W8A16)",
            )
    granularity = _STRATEGIES.get(str(strategy), "tensor")
    return _Read(granularity, ignored, reasons, targets, activations, unused)


def target_names(group: Mapping[str, Any], reasons: list[str]) -> list[str] | None:
    """None: all linear layers. Other entries are expressions and names of modules; names of other
    classes, which have no dot, are added to `reasons`."""
    targets = group.get("targets") or []
    classes = [each for each in targets if not each.startswith("re:") and "." not in each]
    if not targets or set(classes) - {"Linear"}:
        reasons.append(
            f"targets is {group.get('targets')!r} (served: 'Linear', 're:' with an expression, and "
            "names of linear layers)"
        )
    return None if classes else targets


_ALGORITHMS: dict[str, tuple[Granularity, ActivationScales | None]] = {
    "FP8": ("tensor", STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": ("row", BY_TOKEN),
    "FP8_PB_WO": ("block", None),  # weights only
    "FP8_BLOCK_SCALES": ("block", ActivationScales("block")),  # TensorRT-LLM's, as DeepSeek's
}


def _read_modelopt(quantization: Mapping[str, Any]) -> _Read:
    """The own file nests the settings; in config.json they have the names of compressed-tensors."""
    settings = quantization.get("quantization") or quantization
    algorithm = str(settings.get("quant_algo")).upper()  # blocks also occur in lower case
    reasons = []
    if algorithm not in _ALGORITHMS and algorithm != "NONE":
        reasons.append(f"quant_algo is {settings.get('quant_algo')!r}")
    granularity, activations = _ALGORITHMS.get(algorithm, ("tensor", None))
    if granularity == "block":
        reasons += unserved(settings, {"group_size": (BLOCK, None)})
    reasons += unserved(
        settings, {"quantized_layers": ({}, None), "pre_quant_scale": (False, None)}
    )
    ignored = [*(settings.get("exclude_modules") or ()), *(settings.get("ignore") or ())]
    if algorithm == "NONE":
        ignored = _NO_WEIGHTS
    return _Read(granularity, ignored, reasons, activations=activations)


_READERS: dict[str, Callable[[Mapping[str, Any]], _Read]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
}
