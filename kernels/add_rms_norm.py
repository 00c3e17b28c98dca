"""RMSNorm of rows, and its form between two blocks of a decoder: add the block's output to the running sum, normalise.

`add_rms_norm` and `rms_norm` run one Triton kernel where there is any and their plain-torch twins, which are the
definition, elsewhere. Neither knows layers or ranks: under tensor parallelism `x` must already be summed.
"""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.window_attention import has_kernels


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` (arXiv 1910.07467) in float32, rounded once.

    x: `[T, H]`, any stride between rows; weight: `[H]`. Returns `[T, H]`, contiguous on the kernel's path.
    """
    if not has_kernels(x.device):
        return plain_rms_norm(x, weight, eps)
    from tllm_spec.kernels.add_rms_norm_triton import rms_norm_triton

    return rms_norm_triton(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` in place, rounded to its dtype, and return `rms_norm` of what is then in `residual`.

    x, residual: `[T, H]` of one dtype, any stride between rows, sharing no memory; weight: `[H]`. Returns `[T, H]`.
    """
    if not has_kernels(x.device):
        return plain_add_rms_norm(x, residual, weight, eps)
    from tllm_spec.kernels.add_rms_norm_triton import rms_norm_triton

    return rms_norm_triton(x, residual, weight, eps)


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The twin of `rms_norm`."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def plain_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """The twin of `add_rms_norm`."""
    return plain_rms_norm(residual.add_(x), weight, eps)
