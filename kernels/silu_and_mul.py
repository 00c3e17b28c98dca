"""SwiGLU's activation: `silu(gate) * up` of a fused projection's output.

`silu_and_mul` runs a Triton kernel where there is any and its plain-torch reference, which is the
definition, elsewhere."""

import torch
import torch.nn.functional as F

from tllm_spec.kernels.triton_support import has_kernels


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`[T, 2 * I]`, any stride between rows, the gates first, to `[T, I]`. In float32, rounded
    once."""
    if not has_kernels(gate_up.device):
        return plain_silu_and_mul(gate_up)
    from tllm_spec.kernels.silu_and_mul_triton import silu_and_mul_triton

    return silu_and_mul_triton(gate_up)


def plain_silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The reference of `silu_and_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)
