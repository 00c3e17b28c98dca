"""What checkpoints with quantised weights look like: which modules have them, and how codes, scales
and zero points are stored.

With 8 bits the values are E4M3 and `weight = value * scale`. DeepSeek's `weight_scale_inv` is no
exception: it is the inverse of the factor that quantised the weight, so it multiplies as well
(`dequantised` and DeepSeek's own `weight_dequant` agree). No format divides. The formats
differ in how many weights share a scale, in the scale's name and shape, and in how they list the
modules that kept 16 bits:

| written by | described in | scale | of |
|---|---|---|---|
| DeepSeek, Qwen | `quant_method: fp8`, `weight_block_size` | `weight_scale_inv` | blocks |
| AutoFP8, transformers | `quant_method: fp8` | `weight_scale`, `weight_scale_inv` | the tensor |
| llm-compressor | `quant_method: compressed-tensors` | `weight_scale` | tensor, rows or blocks |
| ModelOpt | hf_quant_config.json, `quant_method: modelopt` | `weight_scale` | the same |
| FBGEMM (Meta) | `quant_method: fbgemm_fp8` | `weight_scale` | rows |

A static scale of activations (`input_scale`) comes with the weight. Scales of the KV cache are read
by kv_cache_formats.py.

With 4 bits and whole numbers `weight = (code - zero) * scale`, with codes of 0 to 15:

| written by | described in | codes, scales | zero points |
|---|---|---|---|
| AutoAWQ | `quant_method: awq` | `qweight`, `scales` | `qzeros` |
| GPTQModel, AutoGPTQ | `quant_method: gptq` | `qweight`, `scales` | `qzeros`, in v1 less 1 |
| compressed-tensors | `pack-quantized` | `weight_packed`, `weight_scale` | `weight_zero_point` |

Without zero points they are 8. Others have E2M1 numbers instead:

| described in | codes | scales |
|---|---|---|
| `mxfp4-pack-quantized` | `weight_packed` | `weight_scale`, E8M0 |
| `nvfp4-pack-quantized` | `weight_packed` | `weight_scale`, E4M3, / `weight_global_scale` |
| `quant_algo: NVFP4` (ModelOpt) | `weight` | `weight_scale`, E4M3, * `weight_scale_2` |

The experts of gpt-oss, with `quant_method: mxfp4`, are in models/gpt_oss.py, and tensors of a
GGUF file in gguf_tensors.py.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from tllm_spec.kernels.gemm.int4_weights import MXFP4_GROUP

BLOCK = 128
Granularity = Literal["tensor", "row", "block"]
# Last parts of names. These modules have 16 bits in every format, whether or not it lists them:
# DeepSeek V3's config.json has no list.
_NEVER_QUANTISED = frozenset(
    {"lm_head", "head", "embed_tokens", "gate", "router", "shared_expert_gate", "eh_proj"}
)
# What the name of an FP8 weight's scale adds to the weight's.
SCALE_SUFFIXES = ("_scale_inv", "_scale")
# Last parts of names: static scales of the activations that a linear layer reads.
INPUT_SCALES = ("input_scale", "activation_scale")
# Last parts of names: factors of quantised activations, attention and KV caches.
_LEFT_OUT = frozenset({*INPUT_SCALES, "output_scale", "q_scale", "k_scale", "v_scale", "kv_scale"})


@dataclass(frozen=True)
class ModuleNames:
    """Modules as a configuration lists them."""

    names: frozenset[str] = frozenset()
    """Whole names, or parts of names between dots."""
    patterns: tuple[re.Pattern[str], ...] = ()
    """They match from the start of a name."""

    def has(self, module: str) -> bool:
        """Whether the list has the module under any of its names (`_spellings`)."""
        return any(self._has(name) for name in _spellings(module))

    def _has(self, module: str) -> bool:
        if self.names:
            parts = module.split(".")
            ends = range(1, len(parts) + 1)
            names = (".".join(parts[start:end]) for end in ends for start in range(end))
            if any(name in self.names for name in names):
                return True
        return any(pattern.match(module) for pattern in self.patterns)


# What the names of a text model's layers begin with, alone and next to what sees images.
_OUTER = ("model.", "", "model.language_model.", "language_model.model.")
# Last parts of names: layers in one, which a checkpoint or a list may have one by one.
_IN_ONE = {
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_OTHERS = {part: (name,) for name, parts in _IN_ONE.items() for part in parts} | _IN_ONE


def _spellings(module: str) -> Iterator[str]:
    """The names that lists have for the module, its own first."""
    path, dot, last = module.removeprefix("model.").rpartition(".")
    for outer in _OUTER if module.startswith("model.") else ("",):
        for name in (last, *_OTHERS.get(last, ())):
            yield f"{outer}{path}{dot}{name}"


def is_left_out(name: str) -> bool:
    """Whether the tensor `name` is a scale of activations or of the KV cache."""
    return name[name.rfind(".") + 1 :] in _LEFT_OUT


@dataclass(frozen=True)
class ActivationScales:
    """How linear layers with FP8 weights quantise activations to FP8, too (W8A8)."""

    shared_by: Literal["token", "block", "tensor"] = "token"
    """What has one scale: a token, or 128 inputs of a token, both dynamic; or all tokens, with the
    checkpoint's static scale."""
    bound: float | None = None
    """A token's magnitudes above it count as the bound, and saturate."""


Packing = Literal[
    "awq", "gptq", "gptq_v2", "compressed", "mxfp4", "mxfp4_experts", "nvfp4", "modelopt", "gguf"
]


@dataclass(frozen=True)
class FourBitGroups:
    """Which weights of a row share a scale and a zero point."""

    size: int
    """Neighbouring inputs; 0: all of a row. 32, 64 or 128; 16 with NVFP4."""
    is_ordered: bool = False
    """Whether groups are neighbours only in an order of the inputs that each layer has."""
    is_float: bool = False
    """Whether codes are E2M1 numbers (MXFP4, NVFP4)."""

    @property
    def has_exponents(self) -> bool:
        """Whether scales are powers of two (MXFP4)."""
        return self.is_float and self.size == MXFP4_GROUP


@dataclass(frozen=True)
class Quantisation:
    """How the linear layers of a model are quantised: all of what its checkpoint says, or of a
    `Placement`, what stays so. At most one of `fp8` and `four_bit` is set; without both and without
    `activations` nothing is quantised."""

    fp8: Granularity | None = None
    """The weights in FP8 that share a scale. A CPU keeps FP8 weights only with activations that are
    quantised, too, and then has any granularity."""
    activations: ActivationScales | None = None
    """How activations are quantised next to FP8 weights; None: they are not."""
    four_bit: FourBitGroups | None = None
    packing: Packing | None = None
    """How the checkpoint stores weights of 4 bits."""
    scale_suffix: str = "_scale"
    """The one of `SCALE_SUFFIXES` that errors name."""
    ignored: ModuleNames = ModuleNames()
    """Modules whose weights are not quantised."""
    targets: ModuleNames | None = None
    """Other modules have no quantised weights either; None: any may have them."""
    is_symmetric: bool | None = field(default=None, compare=False)
    """Whether the settings of 4-bit weights say that zero points are 8; None: they do not say."""
    unused: tuple[str, ...] = field(default=(), compare=False)
    """What the configuration says of activations, and why it is not used: a sentence for each. It
    does not change how weights are read."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is quantised."""
        return self.fp8 is None and self.activations is None and self.four_bit is None

    def keeps(self, module: str) -> bool:
        """Whether the configuration gives the linear layer `module`, such as
        `model.layers.0.mlp.gate_proj`, quantised weights."""
        if module[module.rfind(".") + 1 :] in _NEVER_QUANTISED or self.ignored.has(module):
            return False
        return self.targets is None or self.targets.has(module)

    def expert_scales(self, scale: torch.Tensor, shape: torch.Size, name: str) -> torch.Tensor:
        """`row_scales` of experts in one tensor, `[E, N, ceil(K / 128)]` for `[E, N, K]`. Blocks
        are counted from the first gate, or those of ups from the first up."""
        number, rows, columns = shape
        if not scale.dim() or len(scale) != number:
            raise ValueError(f"{name}{self.scale_suffix} has not the scales of {number} experts.")
        halves = 2 * -(-rows // (2 * BLOCK))
        is_halved = scale.shape[1:2] == (halves,) and halves != -(-rows // BLOCK)
        parts = 2 if is_halved else 1
        own = scale.unflatten(1, (2, -1)).flatten(0, 1) if is_halved else scale
        size = rows // parts, columns
        return torch.stack([self.row_scales(each, size, name) for each in own]).view(*shape[:2], -1)

    def row_scales(self, scale: torch.Tensor, shape: Sequence[int], name: str) -> torch.Tensor:
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
        }[str(self.fp8)]
        if tuple(scale.shape) not in accepted or not scale.is_floating_point():
            raise ValueError(
                f"{name}{self.scale_suffix} is {scale.dtype} of the shape {list(scale.shape)}; "
                f"with a scale for each {self.fp8}, a weight of {list(shape)} needs a "
                f"floating-point {list(accepted[0])}."
            )
        scale = scale.float()
        if self.fp8 == "block":
            return scale.view(blocks, columns).repeat_interleave(BLOCK, 0)[:rows].contiguous()
        return scale.view(-1, 1).expand(rows, columns).contiguous()


def granularity_of(scale: torch.Tensor, shape: Sequence[int]) -> Granularity:
    """What shares a scale of a weight `[N, K]`, by the shape of its scales."""
    if scale.numel() == 1:
        return "tensor"
    return "row" if scale.numel() == shape[0] else "block"


PLAIN = Quantisation()
