"""RMSNorm of rows: a Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition. For a few rows `small_m_gemm` norms its own input instead."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import with_kernel


@dataclass(frozen=True)
class NormWeight:
    """RMSNorm of the input; eps is added to the mean square."""

    weight: torch.Tensor
    """`[K]`, of the rows' dtype or float32."""
    eps: float


@with_kernel("rms_norm_triton.rms_norm_triton")
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467) in float32, rounded once; then added
    to `add_to`, which is rounded again.

    x: `[T, H]`, any stride between rows; weight: `[H]`, of x's dtype or float32; add_to: `[T, H]`
    of x's dtype, any stride between rows; changed in place and returned. Without it, returns
    `[T, H]`, contiguous from the kernel."""
    size = (x.shape[-1],)
    if weight.dtype == x.dtype:
        normed = F.rms_norm(x, size, weight, eps)
    else:
        normed = F.rms_norm(x.float(), size, weight, eps).to(x.dtype)
    return normed if add_to is None else add_to.add_(normed)
