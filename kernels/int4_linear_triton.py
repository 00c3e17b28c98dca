"""The Triton kernel of int4_linear.py, which describes inputs and outputs. Importing this file
imports Triton.

As in scaled_linear_triton.py a tile is `[outputs, rows]`, W x^T: codes go from shared memory to
registers, where they become numbers of x's type, and from there to the tensor cores."""

import triton
import triton.language as tl

from tllm_spec.kernels.batch_invariant_linear_triton import tile_of_program
from tllm_spec.kernels.programmatic_launch_triton import launch_dependents, wait_for_previous


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _numbers(
    codes: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    dtype: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """`(codes - zero) * scale` in `dtype`. codes: `[outputs, BLOCK_HALF]` uint8 below 16; scale and
    zero: `[outputs]` float32."""
    # A float32 of 2^23 with the code as its last bits is 2^23 + code. This takes less time than a
    # conversion, and the difference is exact.
    number = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
    number = ((number - (zero + 8388608.0)[:, None]) * scale[:, None]).to(dtype)
    return number.to(tl.float32) if WIDEN else number


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_chunk(
    x_rows: tl.tensor,
    real_row: tl.tensor,
    w_rows: tl.tensor,
    scale_rows: tl.tensor,
    zero_rows: tl.tensor,
    first: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_OUT, BLOCK_ROWS]` float32: sum over inputs `first` to `first + CHUNK`, in order."""
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, num_inputs), 2 * BLOCK_HALF):
        low = start + tl.arange(0, BLOCK_HALF)
        high = low + BLOCK_HALF
        w = tl.load(w_rows + (start // 2 + tl.arange(0, BLOCK_HALF))[None, :])
        if IN % (2 * BLOCK_HALF) == 0:
            x_low = tl.load(x_rows + low[:, None], mask=real_row[None, :], other=0.0)
            x_high = tl.load(x_rows + high[:, None], mask=real_row[None, :], other=0.0)
        else:  # the codes after the last input are multiplied by 0
            mask = (low < IN)[:, None] & real_row[None, :]
            x_low = tl.load(x_rows + low[:, None], mask=mask, other=0.0)
            mask = (high < IN)[:, None] & real_row[None, :]
            x_high = tl.load(x_rows + high[:, None], mask=mask, other=0.0)
        group = start // GROUP
        scale, zero = tl.load(scale_rows + group), tl.load(zero_rows + group)
        dtype: tl.constexpr = x_low.dtype
        w_low = _numbers(w & 15, scale, zero, dtype, WIDEN)
        if GROUP < 2 * BLOCK_HALF:
            group = tl.minimum(group + 1, (IN - 1) // GROUP)
            scale, zero = tl.load(scale_rows + group), tl.load(zero_rows + group)
        w_high = _numbers(w >> 4, scale, zero, dtype, WIDEN)
        if WIDEN:
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        product = tl.dot(w_low, x_low, input_precision="ieee")
        total += tl.dot(w_high, x_high, product, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows", "num_inputs"])  # type: ignore[untyped-decorator]  # triton has no types
def int4_linear_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    output_stride: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SPREADS: tl.constexpr,
    ADDS: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles, chunks or 1). With SPREADS the output is `[chunks, T, N]` float32, without the
    bias. With ADDS the result is added to what the output holds. GROUP is IN where a row has one
    scale.

    `num_inputs` is IN, but not a compile-time constant, so that the loop is pipelined for any
    size."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    rows, outs = tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    # Rows past the end are not read. Outputs past the edge wrap around and are not stored.
    real_row, weight_row = rows < num_rows, (outs % OUT).to(tl.int64)
    x_rows = x + rows.to(tl.int64)[None, :] * x_stride
    w_rows = weight + weight_row[:, None] * (tl.cdiv(IN, 2 * BLOCK_HALF) * BLOCK_HALF)
    scale_rows = scales + weight_row * tl.cdiv(IN, GROUP)
    zero_rows = zeros + weight_row * tl.cdiv(IN, GROUP)
    if SPREADS:
        first = tl.program_id(1) * CHUNK
        total = _sum_chunk(
            x_rows, real_row, w_rows, scale_rows, zero_rows, first, num_inputs,
            IN, GROUP, WIDEN, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK_HALF,
        )  # fmt: skip
        output += tl.program_id(1).to(tl.int64) * num_rows * OUT
    else:
        total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for first in tl.range(0, num_inputs, CHUNK):
            total += _sum_chunk(
                x_rows, real_row, w_rows, scale_rows, zero_rows, first, num_inputs,
                IN, GROUP, WIDEN, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK_HALF,
            )  # fmt: skip
        if bias is not None:
            total += tl.load(bias + outs, mask=outs < OUT, other=0.0).to(tl.float32)[:, None]
    pointers = output + rows.to(tl.int64)[None, :] * output_stride + outs[:, None]
    real = real_row[None, :] & (outs < OUT)[:, None]
    if ADDS:
        total += tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real)
