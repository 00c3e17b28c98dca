"""What checkpoints with FP8 weights look like: which modules have them, and what their scales mean.

In every format that is served the values are E4M3 and `weight = value * scale`. DeepSeek's
`weight_scale_inv` is no exception: it is the inverse of the factor that quantised the weight, so
it multiplies as well (`dequantised` and DeepSeek's own `weight_dequant` agree). No format divides.
The formats differ in how many weights share a scale, in the scale's name and shape, and in how
they list the modules that kept 16 bits:

| written by | described in | scale | of |
|---|---|---|---|
| DeepSeek, Qwen | `quant_method: fp8`, `weight_block_size` | `weight_scale_inv` | blocks |
| AutoFP8, transformers | `quant_method: fp8` | `weight_scale`, `weight_scale_inv` | the tensor |
| llm-compressor | `quant_method: compressed-tensors` | `weight_scale` | tensor, rows or blocks |
| ModelOpt | hf_quant_config.json, `quant_method: modelopt` | `weight_scale` | the same |

Scales of activations and of the KV cache are left out: both stay in the model's dtype."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tllm_spec.models.checkpoint import checkpoint_names
from tllm_spec.models.json_file import read_json

BLOCK = 128
MODELOPT_FILE = "hf_quant_config.json"
# Of config.json; the second is from early versions of compressed-tensors.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
Granularity = Literal["tensor", "row", "block"]
# Last parts of names. These modules have 16 bits in every format, whether or not it lists them:
# DeepSeek V3's config.json has no list.
_NEVER_FP8 = frozenset(
    {"lm_head", "head", "embed_tokens", "gate", "router", "shared_expert_gate", "eh_proj"}
)
# Last parts of names: factors of quantised activations, attention and KV caches.
_LEFT_OUT = frozenset(
    {"input_scale", "activation_scale", "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"}
)
_SERVED = (
    "Of quantized checkpoints those with FP8 (E4M3) weights and one scale for a tensor, a row or a "
    f"block of {BLOCK} x {BLOCK} are served: quant_method 'fp8', 'compressed-tensors' of linear "
    "layers, and ModelOpt's quant_algo 'FP8', 'FP8_PER_CHANNEL_PER_TOKEN' and 'FP8_PB_WO'; other "
    "quantized checkpoints are not served."
)


@dataclass(frozen=True)
class Fp8Format:
    """The format of one checkpoint."""

    granularity: Granularity
    """The weights that share a scale."""
    scale_suffix: str
    """Of a scale's name, after the weight's: `_scale` or `_scale_inv`."""
    ignored: frozenset[str] = frozenset()
    """Modules without FP8 weights: whole names, or parts of names between dots."""
    ignored_patterns: tuple[re.Pattern[str], ...] = ()
    """The same; they match from the start of a name."""

    def keeps(self, module: str) -> bool:
        """Whether the linear layer `module`, such as `model.layers.0.mlp.gate_proj`, has FP8
        weights in the checkpoint."""
        parts = module.split(".")
        if parts[-1] in _NEVER_FP8:
            return False
        ends = range(1, len(parts) + 1)
        names = (".".join(parts[start:end]) for end in ends for start in range(end))
        if self.ignored and any(name in self.ignored for name in names):
            return False
        return not any(pattern.match(module) for pattern in self.ignored_patterns)

    def leaves_out(self, name: str) -> bool:
        """Whether the tensor `name` is not needed: a scale of activations or of the KV cache."""
        return name[name.rfind(".") + 1 :] in _LEFT_OUT

    def row_scales(self, scale: torch.Tensor, shape: tuple[int, int], name: str) -> torch.Tensor:
        """The scales of a weight `[N, K]` for each row and each 128 inputs.

        Args:
            scale: as stored: `[]` or `[1]` of a tensor, `[N, 1]` or `[N]` of rows,
                `[ceil(N / 128), ceil(K / 128)]` of blocks, or ModelOpt's
                `[ceil(N / 128), 1, ceil(K / 128), 1]`.
            shape: the weight's.
            name: the weight's, for errors.

        Returns:
            `[N, ceil(K / 128)]` float32, contiguous.

        Raises:
            ValueError: a scale of another shape, or one that is not floating point.
        """
        rows, columns = shape[0], -(-shape[1] // BLOCK)
        blocks = -(-rows // BLOCK)
        accepted = {
            "tensor": ((), (1,)),
            "row": ((rows, 1), (rows,)),
            "block": ((blocks, columns), (blocks, 1, columns, 1)),
        }[self.granularity]
        if tuple(scale.shape) not in accepted or not scale.is_floating_point():
            raise ValueError(
                f"{name}{self.scale_suffix} is {scale.dtype} of the shape {list(scale.shape)}; "
                f"with a scale for each {self.granularity}, a weight of {list(shape)} needs a "
                f"floating-point {list(accepted[0])}."
            )
        scale = scale.float()
        if self.granularity == "block":
            return scale.view(blocks, columns).repeat_interleave(BLOCK, 0)[:rows].contiguous()
        return scale.view(-1, 1).expand(rows, columns).contiguous()


def fp8_format(path: Path | None, raw: Mapping[str, Any]) -> Fp8Format | None:
    """The format of the checkpoint in the folder `path`, whose config.json is `raw`; None: its
    weights are not quantized. Without `path`, config.json alone counts. ModelOpt's own file comes
    before config.json, which may still describe the model that it was made from.

    Raises:
        ValueError: it is quantized in a way that is not served; all reasons are named.
    """
    quantization = next((raw[key] for key in QUANTIZATION_KEYS if raw.get(key)), None)
    source, method = "quantization_config of config.json", None
    if path is not None and (path / MODELOPT_FILE).is_file():
        quantization, source, method = read_json(path / MODELOPT_FILE), MODELOPT_FILE, "modelopt"
    if not quantization:
        return None
    method = method or quantization.get("quant_method") or _producer(quantization)
    reader = _READERS.get(str(method))
    if reader is None:
        raise ValueError(f"{source}: quant_method is {method!r}. {_SERVED}")
    granularity, ignored, reasons = reader(quantization)
    names, patterns, wrong = _split(ignored)
    reasons += wrong
    if any(str(name).startswith("Llama4") for name in raw.get("architectures") or ()):
        reasons.append("Llama 4's experts are served in 16 or 32 bits")
    if reasons:
        raise ValueError(f"{source}: {'; '.join(reasons)}. {_SERVED}")
    default = "_scale_inv" if method == "fp8" and granularity == "block" else "_scale"
    return Fp8Format(granularity, _scale_suffix(path, default), names, patterns)


def _producer(quantization: Mapping[str, Any]) -> Any:
    """Early versions of ModelOpt name themselves here instead of in `quant_method`."""
    return (quantization.get("producer") or {}).get("name")


def _scale_suffix(path: Path | None, default: str) -> str:
    """As the checkpoint has it: `weight_scale_inv` and `weight_scale` both occur with ModelOpt's
    blocks, with `quant_method: fp8` for a tensor, and in requantised copies of both."""
    for name in checkpoint_names(path) if path is not None else ():
        for suffix in ("_scale_inv", "_scale"):
            if name.endswith(f".weight{suffix}"):
                return suffix
    return default


def _split(
    entries: list[str],
) -> tuple[frozenset[str], tuple[re.Pattern[str], ...], list[str]]:
    """Ignored modules as names and patterns, and reasons against patterns that are not valid.
    After `re:` is a regular expression; `*` stands for any characters, and a module that matches
    is ignored with all below it."""
    names, patterns, wrong = [], [], []
    for entry in entries:
        if not entry.startswith("re:") and "*" not in entry:
            names.append(entry)
            continue
        any_characters = ".*".join(map(re.escape, entry.split("*"))) + r"(\..*)?\Z"
        expression = entry[3:] if entry.startswith("re:") else any_characters
        try:
            patterns.append(re.compile(expression))
        except re.error as error:
            wrong.append(f"{entry!r} among the ignored modules is no regular expression ({error})")
    return frozenset(names), tuple(patterns), wrong


_Read = tuple[Granularity, list[str], list[str]]  # and modules that are ignored, and reasons


def _unserved(settings: Mapping[str, Any], served: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """A reason for each setting that has none of the values that are served."""
    return [
        f"{key} is {settings.get(key)!r} (served: {' or '.join(map(repr, values))})"
        for key, values in served.items()
        if settings.get(key) not in values
    ]


def _read_fp8(quantization: Mapping[str, Any]) -> _Read:
    reasons = _unserved(
        quantization,
        {
            "weight_block_size": ([BLOCK, BLOCK], None),
            "fmt": ("e4m3", None),
            # Powers of 2. In float32 they are like any others.
            "scale_fmt": ("float", "ue8m0", None),
            "expert_dtype": ("fp8", None),
            "modules_to_convert": ([], None),
        },
    )
    ignored = [
        *(quantization.get("modules_to_not_convert") or ()),
        *(quantization.get("ignored_layers") or ()),
    ]
    return ("block" if quantization.get("weight_block_size") else "tensor"), ignored, reasons


_STRATEGIES: dict[Any, Granularity] = {"tensor": "tensor", "channel": "row", "block": "block"}
# Of FP8 both store the same.
_COMPRESSED_FORMATS = ("float-quantized", "naive-quantized")


def _read_compressed_tensors(quantization: Mapping[str, Any]) -> _Read:
    groups = list((quantization.get("config_groups") or {}).values())
    group = groups[0] if groups else {}
    weights = group.get("weights") or {}
    strategy = weights.get("strategy")
    reasons = _unserved(
        quantization, {"format": _COMPRESSED_FORMATS, "transform_config": ({}, None)}
    )
    sparsity = quantization.get("sparsity_config") or {}
    reasons += [f"sparsity_config: {r}" for r in _unserved(sparsity, {"format": ("dense", None)})]
    if len(groups) != 1:
        reasons.append(f"config_groups has {len(groups)} groups (served: 1)")
    reasons += _unserved(group, {"targets": (["Linear"],), "format": (*_COMPRESSED_FORMATS, None)})
    reasons += _unserved(
        weights,
        {
            "type": ("float",),
            "num_bits": (8,),
            "strategy": tuple(_STRATEGIES),
            "symmetric": (True, None),
            "dynamic": (False, None),
        },
    )
    if strategy == "block":
        reasons += _unserved(weights, {"block_structure": ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")})
    return _STRATEGIES.get(strategy, "tensor"), list(quantization.get("ignore") or ()), reasons


_ALGORITHMS: dict[str, Granularity] = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "row",
    "FP8_PB_WO": "block",
    "FP8_BLOCK_SCALES": "block",  # TensorRT-LLM's name for it
}


def _read_modelopt(quantization: Mapping[str, Any]) -> _Read:
    """The own file nests the settings; in config.json they have the names of compressed-tensors."""
    settings = quantization.get("quantization") or quantization
    algorithm = str(settings.get("quant_algo")).upper()  # blocks also occur in lower case
    reasons = []
    if algorithm not in _ALGORITHMS and algorithm != "NONE":
        reasons.append(f"quant_algo is {settings.get('quant_algo')!r}")
    granularity = _ALGORITHMS.get(algorithm, "tensor")
    if granularity == "block":
        reasons += _unserved(settings, {"group_size": (BLOCK, None)})
    reasons += _unserved(
        settings, {"quantized_layers": ({}, None), "pre_quant_scale": (False, None)}
    )
    ignored = [*(settings.get("exclude_modules") or ()), *(settings.get("ignore") or ())]
    if algorithm == "NONE":  # at most the KV cache is quantized
        ignored = ["*"]
    return granularity, ignored, reasons


_READERS = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
}
