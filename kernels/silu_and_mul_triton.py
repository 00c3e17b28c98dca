"""The Triton kernel of silu_and_mul.py, which describes inputs and outputs. Importing this file
imports Triton.

The exponential and the division are the device's approximations. Together their relative error is
at most 2**-21, and for negative gates another |gate| * 2**-24, from the rounding of gate * log2(e).
So 16-bit results may differ from the reference's by one unit in the last place.

GELU is taken as gate * sigmoid(2 u), which is gate * (1 + tanh(u)) / 2. For negative gates the
reference's sum 1 + tanh(u) cancels, and the kernel's result is the better one: they differ by up to
|gate| * 2**-24."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.silu_and_mul import Activation

_BLOCK = 1024  # columns per program: one 16-byte load of 2-byte elements per thread and operand


def silu_and_mul_triton(gate_up: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """See `silu_and_mul`."""
    (num_rows, width), size = gate_up.shape, gate_up.shape[1] // 2
    assert width == 2 * size and gate_up.stride(1) == 1
    output = gate_up.new_empty(num_rows, size)
    silu_and_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        gate_up,
        gate_up.stride(0),
        output,
        IS_GELU=activation != "silu",
        SIZE=size,
        BLOCK=_BLOCK,
        num_warps=4,
        **programmatic_launch(gate_up.device),
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def silu_and_mul_kernel(
    gate_up: tl.tensor,
    row_stride: tl.tensor,
    output: tl.tensor,
    IS_GELU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, blocks of columns)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    gates = gate_up + row * row_stride + columns
    gate = tl.load(gates, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=real, other=0.0).to(tl.float32)
    slope = gate
    if IS_GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    # exp(-gate) is infinite for gates below -88; the quotient is then -0, the right limit.
    activated = gate / (1.0 + tl.exp(-slope)) * up
    tl.store(output + row * SIZE + columns, activated.to(output.dtype.element_ty), mask=real)
