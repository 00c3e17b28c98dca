"""The activation of SwiGLU, `silu(gate) * up`, on the output of a fused projection: a Triton kernel
if Triton is available, otherwise the plain-torch reference, which is the definition."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("silu_and_mul_triton.silu_and_mul_triton")
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 * I]` (gates first, any stride between rows) to `[T, I]`, in float32, rounded once."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)
