"""RMSNorm of rows: a Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition. For a few rows `small_m_gemm` norms its own input instead."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("rms_norm_triton.rms_norm_triton")
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467) in float32, rounded once.

    x: `[T, H]`, any stride between rows; weight: `[H]`. Returns `[T, H]`, contiguous from the
    kernel."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
