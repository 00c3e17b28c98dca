"""RMSNorm of each head, times the SiLU of a gate for each element: a Triton kernel if Triton is
available, otherwise the plain-torch reference, which is the definition."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("gated_norm_triton.gated_norm_triton")
def gated_norm(
    heads: torch.Tensor, gates: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Computed in float32 and rounded once, to the gates' type.

    Args:
        heads: `[T, H, D]` float32, contiguous.
        gates: `[T, H * D]`, any stride between rows.
        weight: `[D]`, of any type.
        eps: added to the mean square.

    Returns:
        `[T, H * D]`.
    """
    normed = heads * (heads.square().mean(2, keepdim=True) + eps).rsqrt() * weight.float()
    return (normed.flatten(1) * F.silu(gates.float())).to(gates.dtype)
