"""A folder with a LoRA adapter in PEFT's format: `adapter_config.json` and
`adapter_model.safetensors`. What is read here is checked in itself; whether it fits a model is for
`adapted.AdapterTables`."""

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tllm_spec.config.option_checks import shown
from tllm_spec.models.checkpoint import listed, opened
from tllm_spec.models.config_file import MAX_SIZE, read_json

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
DRAFT = "draft"  # the sub-folder with an adapter of the draft head
MAX_TENSORS, MAX_BYTES = 1 << 18, 1 << 36
PREFIX = "base_model.model."
_TENSOR = re.compile(r"(.+)\.lora_([AB])\.weight\Z")
_TYPES = ("BF16", "F16", "F32")
HONOURED = """
    r lora_alpha use_rslora target_modules exclude_modules target_parameters rank_pattern
    alpha_pattern
"""
# What has no effect here, since the tensors have it already, or it is of training.
INERT = """
    peft_version task_type auto_mapping base_model_name_or_path revision inference_mode lora_dropout
    layers_to_transform layers_pattern megatron_config megatron_core loftq_config eva_config
    corda_config lora_ga_config runtime_config qalora_group_size ensure_weight_tying
"""
KNOWN = frozenset((HONOURED + INERT).split())
# Initialisations after which the adapter belongs to the model's own weights.
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
# Other keys are refused, unless they are as here or off.
ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": PLAIN_STARTS,
}


@dataclass(frozen=True)
class LowRank:
    """The matrices of one module, or of all experts of a layer."""

    a: torch.Tensor
    """`[r, in]`, or `[E, r, in]`."""
    b: torch.Tensor
    """`[out, r]` or `[E, out, r]`, float32, times the scale."""


@dataclass(frozen=True)
class Adapter:
    """On the host."""

    content_hash: str
    """SHA-256 of what acts: the modules' names, scales and matrices; "+" and that of the draft."""
    rank: int
    """The largest."""
    pairs: Mapping[str, LowRank]
    """By the checkpoint's name of a module; of all experts of a layer by the name of the tensor
    that has them, `model.layers.0.mlp.experts.gate_up_proj`."""
    draft: "Adapter | None" = None
    """That of the draft head; None: its requests have drafts of the head as it is."""


def read_adapter(
    folder: Path, max_rank: int, root: Path | None = None, option: str = "max_lora_rank"
) -> Adapter:
    """root: where the files must lie, after links are followed; None: anywhere. option: which one
    is `max_rank`.

    Raises ValueError with all reasons in one sentence."""
    files = folder / CONFIG, folder / TENSORS
    _check_files(folder, files, root)
    config = read_json(files[0])
    if reasons := list(_refused(config, max_rank, option)):
        raise ValueError(f"{files[0]}: {'; '.join(reasons)}.")
    with opened(files[1]) as checkpoint:
        names = list(checkpoint.keys())
        rules = _Rules(config, checkpoint)
        reasons = [] if len(names) <= MAX_TENSORS else [f"{len(names)} tensors are too many"]
        modules = rules.modules(names, reasons)
        pairs, digest = {}, hashlib.sha256()
        for name in () if reasons else sorted(modules):
            pairs[name] = rules.pair(name, modules[name], reasons, digest)
    if reasons:
        raise ValueError(f"{files[1]}: {listed(reasons)}.")
    return Adapter(digest.hexdigest(), max(each.a.shape[-2] for each in pairs.values()), pairs)


def _check_files(folder: Path, files: tuple[Path, ...], root: Path | None) -> None:
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        pickle = folder / "adapter_model.bin"
        hint = f"; {pickle.name} is a pickle, which is not read" if pickle.exists() else ""
        raise ValueError(
            f"{folder} is no adapter in PEFT's format: no {' and no '.join(absent)}{hint}."
        )
    outside = [
        file.name
        for file in files
        if root is not None and not file.resolve().is_relative_to(root.resolve())
    ]
    if outside:
        raise ValueError(f"{folder} has files outside of {root}: {', '.join(outside)}.")
    if (size := files[1].stat().st_size) > MAX_BYTES:
        raise ValueError(f"{files[1]} has {size} bytes; at most {MAX_BYTES} are read.")


def _refused(config: Mapping[str, Any], max_rank: int, option: str) -> Iterator[str]:
    """Why a configuration is not served."""
    if "peft_type" not in config:
        yield "there is no peft_type; accepted is 'LORA'"
    for key, value in config.items():
        if key in ACCEPTED:
            if not any(value is each or value == each != 1 for each in ACCEPTED[key]):
                accepted = ", ".join(map(repr, ACCEPTED[key]))
                yield f"{key} is {shown(value)}; accepted is {accepted}"
        elif key not in KNOWN and value not in (None, False, [], {}, ""):
            yield f"{key} is {shown(value)}; it is served only if it is off"
    if type(config.get("use_rslora", False)) is not bool:
        yield f"use_rslora is {shown(config['use_rslora'])}; accepted is true or false"
    ranks = ("r", config.get("r", 8)), *_pattern(config, "rank_pattern").items()
    alphas = ("lora_alpha", config.get("lora_alpha", 8)), *_pattern(config, "alpha_pattern").items()
    for key, rank in ranks:
        if type(rank) is not int or not 1 <= rank <= max_rank:
            yield f"{key} is {shown(rank)}; accepted is 1 to {option}, which is {max_rank}"
    for key, alpha in alphas:
        if type(alpha) not in (int, float) or not abs(alpha) <= torch.finfo(torch.float32).max:
            yield f"{key} is {shown(alpha)}; accepted is a finite number of float32"
    yield from _bad_patterns(config)


def _pattern(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key)
    return found if isinstance(found, dict) else {}


def _bad_patterns(config: Mapping[str, Any]) -> Iterator[str]:
    patterns: list[Any] = []
    for key in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(key) or {}, dict):
            yield f"{key} is {shown(config[key])}; accepted is an object"
        patterns += _pattern(config, key)
    for key in ("target_modules", "exclude_modules", "target_parameters"):
        value = config.get(key) or []
        if isinstance(value, str):
            patterns.append(value)
        elif not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            yield f"{key} is {shown(value)}; accepted is a list of names or a pattern"
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            yield f"{shown(pattern)} is no regular expression: {error}"


class _Rules:
    """What a checked configuration says of the tensors of an open file."""

    def __init__(self, config: Mapping[str, Any], checkpoint: Any) -> None:
        self._config, self._checkpoint = config, checkpoint

    def modules(self, names: list[str], reasons: list[str]) -> dict[str, dict[str, str]]:
        """The tensors A and B of each module, by its name without the prefix."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in names:
            if (found := _TENSOR.match(name)) is None:
                reasons.append(f"{shown(name)} is no lora_A.weight or lora_B.weight")
                continue
            module = self._parameter(found[1].removeprefix(PREFIX))
            if (other := modules[module].setdefault(found[2], name)) != name:
                reasons.append(f"{module} has both {other} and {name}")
        for module, tensors in modules.items():
            if len(tensors) < 2:
                reasons.append(f"{module} has no lora_{'B' if 'A' in tensors else 'A'}")
        if not names:
            reasons.append("there are no tensors")
        return modules

    def _parameter(self, module: str) -> str:
        """The name of the tensor that a module has, where it is a parameter with all experts. Of
        two, the first one wrapped, of gates and ups, is the outer one's `base_layer`."""
        outer, kinds = module.removesuffix(".base_layer"), ("gate_up_proj", "down_proj")
        own = [kind for kind in kinds if self._is_parameter(f"{outer}.{kind}")]
        if not own or not outer.endswith("experts"):
            return module
        if module == outer:
            return f"{outer}.{own[-1]}"
        return f"{outer}.{own[0]}" if len(own) == 2 else module

    def _is_parameter(self, name: str) -> bool:
        found = self._config.get("target_parameters") or []
        return any(name == each or name.endswith(f".{each}") for each in found)

    def _is_target(self, module: str) -> bool:
        targets = self._config.get("target_modules")
        excluded = self._config.get("exclude_modules") or []
        return _matches(module, targets or []) and not _matches(module, excluded)

    def _of(self, module: str, key: str, default: Any) -> Any:
        """The value of the first pattern that fits the module."""
        found = (
            value
            for pattern, value in _pattern(self._config, key).items()
            if re.match(rf"(.*\.)?({pattern})$", module)
        )
        return next(found, default)

    def pair(
        self, module: str, tensors: Mapping[str, str], reasons: list[str], digest: Any
    ) -> LowRank:
        """The matrices, checked; in the digest, too."""
        weight = f"{module}.weight"  # where this is the parameter, patterns are for its name
        own = weight if self._is_parameter(weight) else module
        rank = self._of(own, "rank_pattern", self._config.get("r", 8))
        alpha = self._of(own, "alpha_pattern", self._config.get("lora_alpha", 8))
        scale = alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)
        is_parameter = self._is_parameter(module)
        if not (is_parameter or own == weight or self._is_target(module)):
            reasons.append(f"{module} is named by neither target_modules nor target_parameters")
        slices = [self._checkpoint.get_slice(tensors[side]) for side in "AB"]
        a_shape, b_shape = (each.get_shape() for each in slices)
        types = [each.get_dtype() for each in slices]
        if reason := self._misfit(a_shape, b_shape, types, rank, is_parameter):
            reasons.append(f"{module} has {reason}")
            return LowRank(torch.zeros(1, 1), torch.zeros(1, 1))
        a, b = (self._checkpoint.get_tensor(tensors[side]) for side in "AB")
        digest.update(repr((module, scale, types, a_shape, b_shape)).encode())
        for each in (a, b):
            digest.update(each.contiguous().view(torch.uint8).numpy())
        if not (a.isfinite().all() and b.isfinite().all()):
            reasons.append(f"{module} has values that are infinite or no numbers")
        b = b.float() * scale
        if is_parameter:
            number = len(a) // rank
            a, b = a.view(number, rank, -1), b.view(len(b), rank, number).permute(2, 0, 1)
        return LowRank(a, b)

    def _misfit(
        self, a: list[int], b: list[int], types: list[str], rank: int, is_parameter: bool
    ) -> str:
        """Why the shapes or types are refused; "" if they are not."""
        shapes = f"lora_A of the shape {a} and lora_B of {b}"
        if set(types) - {*_TYPES}:
            return f"tensors of the types {' and '.join(types)}; read are {', '.join(_TYPES)}"
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or min(a + b) < 1:
            return f"{shapes}; they must be [r, in] and [out, r]"
        if max(a[1], b[0]) > MAX_SIZE:
            return f"{shapes}; at most {MAX_SIZE} inputs and outputs are read"
        if a[0] != rank and not (is_parameter and a[0] % rank == 0):
            return f"{shapes}; the rank is {rank} by {CONFIG}"
        return ""


def _matches(module: str, names: list[str] | str) -> bool:
    """As PEFT chooses modules: a pattern for the whole name, or last parts of names."""
    if isinstance(names, str):
        return names == "all-linear" or re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
