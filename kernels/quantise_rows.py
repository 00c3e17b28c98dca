"""Activations in FP8 with one scale a token (a row): an optional RMSNorm, rounded to the rows' type
as if it were a layer of its own, then codes and scale. A Triton kernel if Triton is available,
otherwise the plain-torch reference; of the same normed rows both make the same bits, and a row's
bits do not depend on other rows."""

import torch

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.rms_norm import rms_norm
from tllm_spec.kernels.small_m_gemm import NormWeight

LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 2.0**-96  # of a row of zeros, too: neither 0 nor subnormal


@with_kernel("quantise_rows_triton.quantise_rows_triton")
def quantise_rows(
    x: torch.Tensor,
    norm: NormWeight | None = None,
    magnitudes: torch.Tensor | None = None,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[T, K]` float8_e4m3fn and scales `[T]` float32, so that `codes * scale` is about
    `norm(x)`. A scale is the row's largest magnitude divided by 448. Codes are rounded to nearest,
    ties to even, and saturate.

    Args:
        x: `[T, K]` bfloat16, float16 or float32, any stride between rows.
        norm: of x, or None.
        magnitudes: `[T]` float32, contiguous: the largest of each row, if x is a slice of the rows.
        bound: magnitudes above it count as the bound.
    """
    if norm is not None:
        x = rms_norm.reference(x, norm.weight, norm.eps)
    values = x.float()
    largest = values.abs().amax(1) if magnitudes is None else magnitudes
    if bound is not None:
        largest = largest.clamp_max(bound)
    # On CUDA torch multiplies by the reciprocal of a number; a tensor is divided by.
    scales = (largest / largest.new_full((), LARGEST)).clamp_min(SMALLEST_SCALE)
    codes = (values / scales.unsqueeze(1)).clamp_(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scales
