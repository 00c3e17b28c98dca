"""The Triton kernel behind silu_and_mul.py, which says what goes in and comes out. Importing this
file imports Triton.

The exponential and the quotient are the device's approximations: together within 2**-21 of the
value, and for negative gates within another |gate| * 2**-24, by the rounding of gate * log2(e).
bfloat16 and float16 results are the reference's or, where a rounding boundary lies between the two,
its neighbours.

Bytes: 3 T I elements. I = 14336 in bfloat16: 84 KiB a row. Predicted on an H200 (4.8 TB/s) inside a
CUDA graph: T <= 8 is bound by the launch and one trip to memory, about 2 us; T = 512 moves 44 MB, 9
us from HBM, about 11 us in all. Not measured."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

_BLOCK = 1024  # columns a program: one 16-byte load of 2-byte elements a thread for each operand


def silu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_and_mul`."""
    (num_rows, width), size = gate_up.shape, gate_up.shape[1] // 2
    assert width == 2 * size and gate_up.stride(1) == 1
    output = gate_up.new_empty(num_rows, size)
    silu_and_mul_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
        gate_up,
        gate_up.stride(0),
        output,
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
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid (rows, blocks of columns)."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    gates = gate_up + row * row_stride + columns
    gate = tl.load(gates, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=real, other=0.0).to(tl.float32)
    # exp(-gate) is infinite below -88, and the quotient then -0, which is right.
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(output + row * SIZE + columns, activated.to(output.dtype.element_ty), mask=real)
