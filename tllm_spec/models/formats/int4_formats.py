"""What checkpoints with 4-bit weights look like: which modules have them, and how codes, scales and
zero points are packed.

With whole numbers `weight = (code - zero) * scale`, with codes of 0 to 15:

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

The experts of gpt-oss, with `quant_method: mxfp4`, are in gpt_oss_tensors.py, and tensors of a GGUF
file in gguf_tensors.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from tllm_spec.kernels.gemm.int4_weights import MXFP4_GROUP
from tllm_spec.models.formats.fp8_formats import ModuleNames, lists_quantised

Packing = Literal[
    "awq", "gptq", "gptq_v2", "compressed", "mxfp4", "mxfp4_experts", "nvfp4", "modelopt", "gguf"
]


@dataclass(frozen=True)
class Int4Groups:
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
class Int4Format:
    """The format of one checkpoint."""

    groups: Int4Groups
    packing: Packing
    ignored: ModuleNames
    """Modules without 4-bit weights."""
    targets: ModuleNames | None = None
    """Other modules have none either; None: any may have them."""
    is_symmetric: bool | None = field(default=None, compare=False)
    """Whether the settings of AWQ and GPTQ say that zero points are 8; None: they do not say."""
    unused: tuple[str, ...] = field(default=(), compare=False)
    """As in `Fp8Format`."""

    def keeps(self, module: str) -> bool:
        """Whether the configuration gives the linear layer `module` 4-bit weights."""
        return lists_quantised(module, self.ignored, self.targets)
