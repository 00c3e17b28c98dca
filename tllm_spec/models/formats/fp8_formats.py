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
| FBGEMM (Meta) | `quant_method: fbgemm_fp8` | `weight_scale` | rows |

A static scale of activations (`input_scale`) comes with the weight. Scales of the KV cache are read
by kv_cache_formats.py."""

import re
from dataclasses import dataclass, field
from typing import Literal

import torch

BLOCK = 128
Granularity = Literal["tensor", "row", "block"]
# Last parts of names. These modules have 16 bits in every format, whether or not it lists them:
# DeepSeek V3's config.json has no list.
_NEVER_QUANTISED = frozenset(
    {"lm_head", "head", "embed_tokens", "gate", "router", "shared_expert_gate", "eh_proj"}
)
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
        if self.names:
            parts = module.split(".")
            ends = range(1, len(parts) + 1)
            names = (".".join(parts[start:end]) for end in ends for start in range(end))
            if any(name in self.names for name in names):
                return True
        return any(pattern.match(module) for pattern in self.patterns)


def lists_quantised(module: str, ignored: ModuleNames, targets: ModuleNames | None) -> bool:
    """Whether a configuration gives the linear layer `module` quantised weights. Without targets
    every layer has them that is not ignored."""
    if module[module.rfind(".") + 1 :] in _NEVER_QUANTISED or ignored.has(module):
        return False
    return targets is None or targets.has(module)


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


@dataclass(frozen=True)
class Fp8Format:
    """The format of one checkpoint."""

    granularity: Granularity
    """The weights that share a scale."""
    scale_suffix: str
    """What a scale's name adds to the weight's: `_scale` or `_scale_inv`."""
    ignored: ModuleNames = ModuleNames()
    """Modules without FP8 weights."""
    targets: ModuleNames | None = None
    """Other modules have no FP8 weights either; None: any may have them."""
    activations: ActivationScales | None = None
    """None: the model computes with activations of its own type."""
    unused: tuple[str, ...] = field(default=(), compare=False)
    """What the configuration says of activations, and why it is not used: a sentence for each. It
    does not change how weights are read."""

    def keeps(self, module: str) -> bool:
        """Whether the configuration gives the linear layer `module`, such as
        `model.layers.0.mlp.gate_proj`, FP8 weights."""
        return lists_quantised(module, self.ignored, self.targets)

    def leaves_out(self, name: str) -> bool:
        """Whether the tensor `name` is not needed: a scale of activations or of the KV cache."""
        return is_left_out(name)

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
