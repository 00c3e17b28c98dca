"""The activation of SwiGLU, `silu(gate) * up`, on the output of a fused projection: a Triton kernel
if Triton is available, otherwise the plain-torch reference, which is the definition."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.triton_support import has_kernels


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 * I]` (gates first, any stride between rows) to `[T, I]`, in float32, rounded once."""
    if not has_kernels(gate_up.device):
        return plain_silu_and_mul(gate_up)
    from tllm_spec.kernels.silu_and_mul_triton import silu_and_mul_triton

    return silu_and_mul_triton(gate_up)


def plain_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Reference of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)
