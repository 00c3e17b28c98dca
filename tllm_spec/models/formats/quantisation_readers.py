"""Reads what config.json, ModelOpt's file and GPTQ's say of quantised weights, and refuses what is
not served."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.models.checkpoint import checkpoint_names
from tllm_spec.models.config_file import read_json
from tllm_spec.models.formats.gguf_tensors import Q4_0, Q4_0_GROUP, gguf_names
from tllm_spec.models.formats.quantisation import (
    BLOCK,
    PLAIN,
    SCALE_SUFFIXES,
    ActivationScales,
    FourBitGroups,
    Granularity,
    ModuleNames,
    Packing,
    Quantisation,
)
from tllm_spec.zoo.registry import is_gguf

MODELOPT_FILE, GPTQ_FILE = "hf_quant_config.json", "quantize_config.json"
# Keys of config.json; the second is from early versions of compressed-tensors.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
NVFP4_GROUP = 16
UNUSED_ACTIVATIONS = "activations of NVFP4 are not quantised (W4A16)"
WIDE_FP8 = "weights in FP8 next to NVFP4 are dequantised at load"
_SIZES = (32, 64, 128)
_PACKED, _MXFP4, _NVFP4 = "pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_SERVED = (
    "Of quantized checkpoints those with FP8 (E4M3) weights and one scale for a tensor, a row or a "
    f"block of {BLOCK} x {BLOCK} are served: quant_method 'fp8', 'fbgemm_fp8', "
    "'compressed-tensors' of linear layers, and ModelOpt's quant_algo 'FP8', "
    "'FP8_PER_CHANNEL_PER_TOKEN' and 'FP8_PB_WO'; those with integers of 4 bits in groups of "
    f"{', '.join(map(str, _SIZES))} inputs or whole rows: quant_method 'awq', 'gptq', and "
    f"'compressed-tensors' in the format {_PACKED!r}; MXFP4, in its format {_MXFP4!r}, NVFP4, in "
    f"its format {_NVFP4!r} and as ModelOpt's quant_algo 'NVFP4'; and gpt-oss's experts with "
    "quant_method 'mxfp4'; other quantized checkpoints are not served."
)
# One dynamic scale a tensor counts as one a token: that of a batch would let requests change each
# other's text.
BY_TOKEN, BY_BLOCK = ActivationScales("token"), ActivationScales("block")
STATIC = ActivationScales("tensor")
Settings = Mapping[str, Any]
Served = Mapping[str, tuple[Any, ...]]
Reader = Callable[[Settings, list[str]], Quantisation]


def read_quantisation(path: Path | None, raw: Settings) -> Quantisation:
    """How the checkpoint in the folder `path` is quantised, whose config.json is `raw`. Without
    `path`, config.json alone counts. ModelOpt's own file comes before config.json, which may still
    describe the model that it was made from.

    Raises:
        ValueError: it is quantised in a way that is not served; all reasons are named.
    """
    if path is not None and is_gguf(path):
        groups = FourBitGroups(Q4_0_GROUP)
        return Quantisation(four_bit=groups, packing="gguf") if gguf_names(path, Q4_0) else PLAIN
    settings, source, method = quantization_settings(path, raw)
    if settings is None and path is not None and (path / GPTQ_FILE).is_file():
        settings, source = {"quant_method": "gptq"} | read_json(path / GPTQ_FILE), GPTQ_FILE
    if not settings:
        return PLAIN
    if not isinstance(settings, Mapping):
        raise ValueError(f"{source} is {shown(settings)}; it must be an object. {_SERVED}")
    method = method or settings.get("quant_method") or _producer(settings)
    reader = _READERS.get(str(method))
    if reader is None:
        raise ValueError(f"{source}: quant_method is {method!r}. {_SERVED}")
    reasons = wrong_types(settings)
    found = PLAIN if reasons else reader(settings, reasons)
    if reasons:
        raise ValueError(f"{source}: {'; '.join(reasons)}. {_SERVED}")
    if found.fp8 is None:
        return found
    default = "_scale_inv" if method == "fp8" and found.fp8 == "block" else "_scale"
    return replace(found, scale_suffix=_scale_suffix(path, default))


def quantization_settings(path: Path | None, raw: Settings) -> tuple[Any, str, str | None]:
    """What describes the quantisation, which file it is from, and the `quant_method` that this file
    stands for."""
    if path is not None and (path / MODELOPT_FILE).is_file():
        return read_json(path / MODELOPT_FILE), MODELOPT_FILE, "modelopt"
    found = next((raw[key] for key in QUANTIZATION_KEYS if raw.get(key)), None)
    return found, "quantization_config of config.json", None


_OBJECTS = ("config_groups", "input_activations", "quantization", "sparsity_config", "weights")
_LISTS = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert", "targets")


def wrong_types(settings: Settings, prefix: str = "") -> list[str]:
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


def _producer(settings: Settings) -> Any:
    """Early versions of ModelOpt name themselves here instead of in `quant_method`."""
    producer = settings.get("producer")
    return producer.get("name") if isinstance(producer, Mapping) else None


def _scale_suffix(path: Path | None, default: str) -> str:
    """As the checkpoint has it: `weight_scale_inv` and `weight_scale` both occur with ModelOpt's
    blocks, with `quant_method: fp8` for a tensor, and in requantised copies of both."""
    for name in checkpoint_names(path) if path is not None else ():
        for suffix in SCALE_SUFFIXES:
            if name.endswith(f".weight{suffix}"):
                return suffix
    return default


def _names_in(
    settings: Settings, keys: str, reasons: list[str], more: Iterator[str] | None = None
) -> ModuleNames:
    """The modules that the lists under `keys` leave out, and `more`."""
    listed = [*(more or ()), *(each for key in keys.split() for each in settings.get(key) or ())]
    return module_names(listed, "ignored modules", reasons)


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


def unserved(settings: Settings, served: Served) -> list[str]:
    """A reason for each setting that has none of the values that are served."""
    return [
        f"{key} is {settings.get(key)!r} (served: {' or '.join(map(repr, values))})"
        for key, values in served.items()
        if settings.get(key) not in values
    ]


def _of_no_weights() -> Quantisation:
    """At most the KV cache is quantised. Its scales are left out, as in any FP8 checkpoint."""
    return Quantisation("tensor", ignored=module_names(["*"], "ignored modules", []))


_FP8: Served = {
    "weight_block_size": ([BLOCK, BLOCK], None),
    "fmt": ("e4m3", None),
    # Powers of 2. In float32 they are like any others.
    "scale_fmt": ("float", "ue8m0", None),
    "expert_dtype": ("fp8", None),
    "modules_to_convert": ([], None),
    "activation_scheme": ("dynamic", "static", None),
}


def _read_fp8(settings: Settings, reasons: list[str]) -> Quantisation:
    reasons += unserved(settings, _FP8)
    ignored = _names_in(settings, "modules_to_not_convert ignored_layers", reasons)
    is_static = settings.get("activation_scheme") == "static"
    if not settings.get("weight_block_size"):
        return Quantisation("tensor", STATIC if is_static else BY_TOKEN, ignored=ignored)
    if is_static:
        reasons.append("activation_scheme is 'static' (with weight_block_size: 'dynamic')")
    return Quantisation("block", BY_BLOCK, ignored=ignored)


def _read_fbgemm(settings: Settings, reasons: list[str]) -> Quantisation:
    """One scale a token, up to a bound."""
    bound = settings.get("activation_scale_ub")
    if bound is not None and not (isinstance(bound, (int, float)) and bound > 0):
        reasons.append(f"activation_scale_ub is {bound!r} (it must be a number above 0)")
        bound = None
    ignored = _names_in(settings, "modules_to_not_convert", reasons)
    return Quantisation("row", ActivationScales(bound=bound), ignored=ignored)


def _group_size(settings: Settings, key: str, reasons: list[str]) -> int:
    """0 for whole rows, which the checkpoints call -1."""
    size = settings.get(key)
    if size == -1:
        return 0
    if size not in _SIZES:
        reasons.append(f"{key} is {shown(size)} (served: {', '.join(map(str, _SIZES))} or -1)")
        return 0
    return int(size)


def _read_awq(settings: Settings, reasons: list[str]) -> Quantisation:
    """Where a setting has two names, AutoAWQ's own file has the second."""
    bits = "w_bit" if "w_bit" in settings else "bits"
    reasons += unserved(settings, {bits: (4,)})
    version = str(settings.get("version", "gemm")).lower()
    reasons += unserved({"version": version}, {"version": ("gemm",)})
    key = "q_group_size" if "q_group_size" in settings else "group_size"
    return Quantisation(
        four_bit=FourBitGroups(_group_size(settings, key, reasons)),
        packing="awq",
        ignored=_names_in(settings, "modules_to_not_convert", reasons),
        is_symmetric=not settings.get("zero_point", True),
    )


def _read_gptq(settings: Settings, reasons: list[str]) -> Quantisation:
    reasons += unserved(settings, {"bits": (4,), "is_marlin_format": (False, None)})
    key = "checkpoint_format" if settings.get("checkpoint_format") else "format"
    reasons += unserved(settings, {key: ("gptq", "gptq_v2", None)})
    size, sym = _group_size(settings, "group_size", reasons), settings.get("sym")
    skipped = _skipped(settings, reasons)
    return Quantisation(
        four_bit=FourBitGroups(size, bool(settings.get("desc_act")) and size > 0),
        packing="gptq_v2" if settings.get(key) == "gptq_v2" else "gptq",
        ignored=_names_in(settings, "modules_to_not_convert", reasons, skipped),
        is_symmetric=None if sym is None else bool(sym),
    )


def _skipped(settings: Settings, reasons: list[str]) -> Iterator[str]:
    """GPTQModel's `dynamic` has settings of single modules by regular expressions: only those that
    leave a module out, which start with `-:`."""
    for expression in settings.get("dynamic") or {}:
        if str(expression).startswith("-:"):
            yield f"re:{expression[2:]}"
        else:
            reasons.append(f"dynamic has other settings for {shown(expression)} (served: '-:')")


_STRATEGIES: dict[str, Granularity] = {"tensor": "tensor", "channel": "row", "block": "block"}
# Both store FP8 in the same way.
_FP8_FORMATS = ("float-quantized", "naive-quantized")
_FP8_WEIGHTS: Served = {
    "type": ("float",),
    "num_bits": (8,),
    "strategy": tuple(_STRATEGIES),
    "symmetric": (True, None),
    "dynamic": (False, None),
}
_ACTIVATIONS: Served = {"type": ("float",), "num_bits": (8,), "symmetric": (True, None)}
# Of `actorder` only "group", once called true, changes what is stored.
_INTEGERS: dict[str, tuple[Any, ...]] = {
    "type": ("int",),
    "num_bits": (4,),
    "strategy": ("group", "channel"),
    "symmetric": (True, False, None),
    "dynamic": (False, None),
    "actorder": (None, "group", "static", "weight", "dynamic", True, False),
}
_FLOAT = _INTEGERS | {
    "type": ("float",),
    "strategy": ("group",),
    "group_size": (32,),
    "symmetric": (True, None),
    "actorder": (None, False),
}
_FLOAT_OF_16 = _FLOAT | {"strategy": ("tensor_group", "group"), "group_size": (NVFP4_GROUP,)}
# The formats of 4 bits, and the settings of their weights.
_FORMATS: dict[str, tuple[Packing, Served]] = {
    _PACKED: ("compressed", _INTEGERS),
    _MXFP4: ("mxfp4", _FLOAT),
    _NVFP4: ("nvfp4", _FLOAT_OF_16),
}


def _read_compressed(settings: Settings, reasons: list[str]) -> Quantisation:
    sparsity = settings.get("sparsity_config") or {}
    reasons += unserved(settings, {"transform_config": ({}, None)})
    reasons += [f"sparsity_config: {r}" for r in unserved(sparsity, {"format": ("dense", None)})]
    groups = list((settings.get("config_groups") or {}).values())
    if not groups and settings.get("kv_cache_scheme"):
        return _of_no_weights()
    # Groups may have the format, too, and alone.
    formats = [settings.get("format"), *(group.get("format") for group in groups)]
    written = next((name for name in map(str, formats) if name in _FORMATS), None)
    accepted = _FP8_FORMATS if written is None else (written,)
    if written is None:
        reasons += unserved(settings, {"format": accepted})
    if len(groups) != 1:
        reasons.append(f"config_groups has {len(groups)} groups (served: 1)")
    group = groups[0] if groups else {}
    targets = None
    if groups:
        reasons += unserved(group, {"format": (*accepted, None)})
        if (names := _target_names(group, reasons)) is not None:
            targets = module_names(names, "targets", reasons)
    read = _compressed_fp8 if written is None else _compressed_four_bit
    ignored = _names_in(settings, "ignore", reasons)
    return replace(read(group, written or "", reasons), ignored=ignored, targets=targets)


def _compressed_fp8(group: Settings, written: str, reasons: list[str]) -> Quantisation:
    weights, unused = group.get("weights") or {}, tuple[str, ...]()
    strategy = weights.get("strategy")
    if group:
        reasons += unserved(weights, _FP8_WEIGHTS)
    if strategy == "block":
        reasons += unserved(weights, {"block_structure": ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")})
    activations = _group_activations(group)
    if group.get("input_activations") and activations is None:
        unused = (
            "input_activations of config_groups is not used: activations are not quantised (W8A16)",
        )
    return Quantisation(_STRATEGIES.get(str(strategy), "tensor"), activations, unused=unused)


def _group_activations(group: Settings) -> ActivationScales | None:
    """None: they are not quantised, or not as it is served."""
    settings = group.get("input_activations") or {}
    if unserved(settings, _ACTIVATIONS):
        return None
    strategy, dynamic = settings.get("strategy"), settings.get("dynamic") or False
    if strategy == "group" and dynamic is True and settings.get("group_size") == BLOCK:
        return BY_BLOCK
    if strategy in ("token", "tensor") and dynamic is True:
        return BY_TOKEN
    return STATIC if strategy == "tensor" and dynamic is False else None


def _compressed_four_bit(group: Settings, written: str, reasons: list[str]) -> Quantisation:
    (packing, of_weights), size, unused = _FORMATS[written], 0, tuple[str, ...]()
    weights = group.get("weights") or {}
    if group.get("input_activations") and written == _NVFP4:
        unused = (UNUSED_ACTIVATIONS,)
    else:
        reasons += unserved(group, {"input_activations": (None,)})
    if group:
        reasons += unserved(weights, of_weights)
    if written == _NVFP4:
        size = NVFP4_GROUP
    elif weights.get("strategy") == "group":
        size = _group_size(weights, "group_size", reasons)
    is_ordered = weights.get("actorder") in ("group", True) and size > 0
    groups = FourBitGroups(size, is_ordered, written != _PACKED)
    is_symmetric = weights.get("symmetric") is not False
    return Quantisation(four_bit=groups, packing=packing, is_symmetric=is_symmetric, unused=unused)


def _target_names(group: Settings, reasons: list[str]) -> list[str] | None:
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
    "FP8_BLOCK_SCALES": ("block", BY_BLOCK),  # TensorRT-LLM's, as DeepSeek's
}


def _read_modelopt(settings: Settings, reasons: list[str]) -> Quantisation:
    """The own file nests the settings; in config.json they have the names of compressed-tensors.
    NVFP4 quantises activations, too, there; here they are not."""
    settings = settings.get("quantization") or settings
    algorithm = str(settings.get("quant_algo")).upper()  # blocks also occur in lower case
    if algorithm == "MIXED_PRECISION":
        return _read_mixed(settings, reasons)
    is_four_bit = algorithm == "NVFP4"
    if algorithm not in _ALGORITHMS and not is_four_bit and algorithm != "NONE":
        reasons.append(f"quant_algo is {settings.get('quant_algo')!r}")
    granularity, activations = _ALGORITHMS.get(algorithm, ("tensor", None))
    if is_four_bit or granularity == "block":
        size = NVFP4_GROUP if is_four_bit else BLOCK
        reasons += unserved(settings, {"group_size": (size, None)})
    reasons += unserved(
        settings, {"quantized_layers": ({}, None), "pre_quant_scale": (False, None)}
    )
    ignored = _names_in(settings, "exclude_modules ignore", reasons)
    if algorithm == "NONE":
        return _of_no_weights()
    if not is_four_bit:
        return Quantisation(granularity, activations, ignored=ignored)
    groups, unused = FourBitGroups(NVFP4_GROUP, is_float=True), (UNUSED_ACTIVATIONS,)
    return Quantisation(four_bit=groups, packing="modelopt", ignored=ignored, unused=unused)


def _read_mixed(settings: Settings, reasons: list[str]) -> Quantisation:
    """`quantized_layers` names each layer with its algorithm."""
    layers = settings.get("quantized_layers")
    found = {
        name: str(own.get("quant_algo"))
        for name, own in (layers.items() if isinstance(layers, Mapping) else ())
        if isinstance(own, Mapping)
    }
    if "NVFP4" not in found.values() or set(found.values()) - {"NVFP4", *_ALGORITHMS}:
        reasons.append(f"quant_algo is {settings['quant_algo']!r}")
        reasons.append(f"quantized_layers is {shown(layers)} (served: NVFP4 next to FP8)")
    names = [name for name, algorithm in found.items() if algorithm == "NVFP4"]
    own = {**settings, "quant_algo": "NVFP4", "quantized_layers": None}
    targets = module_names(names, "quantized_layers", reasons)
    unused = UNUSED_ACTIVATIONS, WIDE_FP8
    return replace(_read_modelopt(own, reasons), targets=targets, unused=unused)


def _read_mxfp4(settings: Settings, reasons: list[str]) -> Quantisation:
    return Quantisation(
        four_bit=FourBitGroups(32, is_float=True),
        packing="mxfp4_experts",
        ignored=_names_in(settings, "modules_to_not_convert", reasons),
        targets=module_names(["*.experts"], "targets", reasons),
    )


_READERS: dict[str, Reader] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}
