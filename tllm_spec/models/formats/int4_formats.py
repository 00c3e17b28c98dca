"""What checkpoints with 4-bit weights look like: which modules have them, and how codes, scales and
zero points are packed.

With whole numbers `weight = (code - zero) * scale`, with codes of 0 to 15:

| written by | described in | codes, scales | zero points |
|---|---|---|---|
| AutoAWQ | `quant_method: awq` | `qweight`, `scales` | `qzeros` |
| GPTQModel, AutoGPTQ | `quant_method: gptq` | `qweight`, `scales` | `qzeros`, in v1 less 1 |
| compressed-tensors | `pack-quantized` | `weight_packed`, `weight_scale` | `weight_zero_point` |

Without zero points they are 8. `mxfp4-pack-quantized` of compressed-tensors has E2M1 numbers
instead, and scales that are powers of two. So have the experts of gpt-oss, with
`quant_method: mxfp4` (gpt_oss_tensors.py).
"""

from dataclasses import dataclass
from typing import Literal

from tllm_spec.models.formats.fp8_formats import ModuleNames, lists_quantised

Packing = Literal["awq", "gptq", "gptq_v2", "compressed", "mxfp4", "mxfp4_experts"]


@dataclass(frozen=True)
class Int4Groups:
    """Which weights of a row share a scale and a zero point."""

    size: int
    """Neighbouring inputs; 0: all of a row. 32, 64 or 128."""
    is_ordered: bool = False
    """Whether groups are neighbours only in an order of the inputs that each layer has."""
    is_float: bool = False
    """Whether codes are E2M1 numbers (MXFP4)."""


@dataclass(frozen=True)
class Int4Format:
    """The format of one checkpoint."""

    groups: Int4Groups
    packing: Packing
    ignored: ModuleNames
    """Modules without 4-bit weights."""
    targets: ModuleNames | None = None
    """Other modules have none either; None: any may have them."""

    def keeps(self, module: str) -> bool:
        """Whether the configuration gives the linear layer `module` 4-bit weights."""
        return lists_quantised(module, self.ignored, self.targets)
