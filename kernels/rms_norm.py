"""RMSNorm of rows.

`rms_norm` runs one Triton kernel where there is any and its plain-torch reference, which is the
definition, elsewhere. It does not know layers. For few rows `small_m_gemm` norms its own input
instead."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.triton_support import has_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467) in float32, rounded once.

    x: `[T, H]`, any stride between rows; weight: `[H]`. Returns `[T, H]`, contiguous on the
    kernel's path."""
    if not has_kernels(x.device):
        return plain_rms_norm(x, weight, eps)
    from tllm_spec.kernels.rms_norm_triton import rms_norm_triton

    return rms_norm_triton(x, weight, eps)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The reference of `rms_norm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
