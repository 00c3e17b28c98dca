"""Activations in FP8: an optional RMSNorm, or SwiGLU, rounded to the rows' type as if it were a
layer of its own, then codes and scales. A Triton kernel if Triton is available, otherwise the
plain-torch reference; of the same rounded rows both make the same bits, and a row's bits do not
depend on other rows."""

import torch

from tllm_spec.kernels.dequantise import BLOCK
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.rms_norm import NormWeight, rms_norm
from tllm_spec.kernels.silu_and_mul import silu_and_mul

LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 2.0**-96  # of zeros, too: neither 0 nor subnormal
ROWS_TOGETHER = 4  # whose scales of a block cuBLASLt reads in 16 bytes


@with_kernel("quantise_rows_triton.quantise_rows_triton")
def quantise_rows(
    x: torch.Tensor,
    norm: NormWeight | None = None,
    *,
    gated: bool = False,
    in_blocks: bool = False,
    scale: torch.Tensor | None = None,
    magnitudes: torch.Tensor | None = None,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[T, K]` float8_e4m3fn and scales `[G, T]` float32, so that `codes * scale` is about x
    after norm or SwiGLU. A dynamic scale is the largest magnitude divided by 448: of a row (G is 1)
    or of BLOCK inputs of a row (G is `ceil(K / BLOCK)`). Codes are rounded to nearest, ties to
    even, and saturate.

    Args:
        x: `[T, K]`, or `[T, 2 * K]` if gated; bfloat16, float16 or float32, any stride between
            rows.
        norm: of x, or None.
        gated: SwiGLU comes first: x has gates, then what they multiply. Without a norm.
        in_blocks: whether BLOCK inputs share a scale.
        scale: float32, static: `[]` of all rows, or `[T]` of each. Without `in_blocks`.
        magnitudes: `[T, M]` float32, contiguous: the largest of each row's parts, if x is one of
            them.
        bound: of a row's scale: magnitudes above it count as the bound.

    The kernel allocates codes and scales of blocks for a multiple of 4 rows (fp8_gemms.py).
    """
    if norm is not None:
        x = rms_norm.reference(x, norm.weight, norm.eps)
    values = (silu_and_mul.reference(x) if gated else x).float()
    number, size = values.shape
    width = BLOCK if in_blocks else size
    groups = torch.nn.functional.pad(values, (0, -size % width)).view(number, -1, width)
    if scale is None:
        largest = groups.abs().amax(2) if magnitudes is None else magnitudes.amax(1, keepdim=True)
        if bound is not None:
            largest = largest.clamp_max(bound)
        # On CUDA torch multiplies by the reciprocal of a number; a tensor is divided by.
        scales = (largest / largest.new_full((), LARGEST)).clamp_min(SMALLEST_SCALE)
    else:
        scales = scale.expand(number).unsqueeze(1)
    codes = (groups / scales.unsqueeze(2)).clamp_(-LARGEST, LARGEST).view(number, -1)[:, :size]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales.t().contiguous()
