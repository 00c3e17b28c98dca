"""The activation of SwiGLU, `silu(gate) * up`, or of GeGLU, `gelu(gate) * up`, on the output of a
fused projection: a Triton kernel if Triton is available, otherwise the plain-torch reference, which
is the definition."""

from typing import Literal

import torch
import torch.nn.functional as F

from tllm_spec.kernels.dispatch import with_kernel

Activation = Literal["silu", "gelu_pytorch_tanh"]
"""As `hidden_act` of a config.json. The second is GELU with tanh (arXiv 1606.08415, section 2)."""


@with_kernel("silu_and_mul_triton.silu_and_mul_triton")
def silu_and_mul(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """`[T, 2 * I]` (gates first, any stride between rows) to `[T, I]`, in float32, rounded once.
    activation: of the gates."""
    gate, up = gate_up.chunk(2, -1)
    gate = gate.float()
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate.mul_(up).to(gate_up.dtype)
