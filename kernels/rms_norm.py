"""RMSNorm of rows: a Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition. For a few rows `small_m_gemm` norms its own input instead."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.triton_support import has_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467) in float32, rounded once.

    x: `[T, H]`, any stride between rows; weight: `[H]`. Returns `[T, H]`, contiguous from the
    kernel."""
    if not has_kernels(x.device):
        return plain_rms_norm(x, weight, eps)
    from tllm_spec.kernels.rms_norm_triton import rms_norm_triton

    return rms_norm_triton(x, weight, eps)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of `rms_norm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
