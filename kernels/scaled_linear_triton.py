"""The Triton kernel of scaled_linear.py, which describes inputs and outputs, and the step of FP8
weights, which it shares with the grouped GEMM. Importing this file imports Triton.

As in batch_invariant_linear_triton.py a tile is `[outputs, rows]`, W x^T. The weight goes from
shared memory to registers, where it is converted, and from there to the tensor cores."""

import triton
import triton.language as tl

from tllm_spec.kernels.batch_invariant_linear_triton import tile_of_program
from tllm_spec.kernels.int4_weights_triton import add_int4_dot
from tllm_spec.kernels.programmatic_launch_triton import launch_dependents, wait_for_previous


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def add_scaled_dot(
    total: tl.tensor, w: tl.tensor, x: tl.tensor, scale: tl.tensor, WIDEN: tl.constexpr
) -> tl.tensor:
    """`total + scale * (w x)` for a block of inputs. w: `[outputs, BLOCK]` in FP8; x: `[BLOCK,
    rows]`; scale: `[outputs]`."""
    # By way of float32: the direct conversion to bfloat16 has an eighth of the throughput.
    w = w.to(tl.float32)
    if WIDEN:
        x = x.to(tl.float32)
    product = tl.dot(w.to(x.dtype), x, input_precision="ieee")
    # An explicit FMA has the same bits wherever the compiler might contract and where not.
    return tl.fma(product, tl.broadcast_to(scale[:, None], total.shape), total)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_chunk(
    x_rows: tl.tensor,
    real_row: tl.tensor,
    w_rows: tl.tensor,
    scale_rows: tl.tensor,
    first: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_OUT, BLOCK_ROWS]` float32: sum over inputs `first` to `first + CHUNK`, in order."""
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, num_inputs), BLOCK):
        if GROUP:
            total = add_int4_dot(
                total, x_rows, real_row, w_rows, scale_rows, start, IN, GROUP, BLOCK, WIDEN
            )
        else:
            inputs = start + tl.arange(0, BLOCK)
            scale = tl.load(scale_rows + start // BLOCK)
            if IN % BLOCK == 0:
                w = tl.load(w_rows + inputs[None, :])
                x = tl.load(x_rows + inputs[:, None], mask=real_row[None, :], other=0.0)
            else:
                w = tl.load(w_rows + inputs[None, :], mask=(inputs < IN)[None, :], other=0.0)
                x_mask = (inputs < IN)[:, None] & real_row[None, :]
                x = tl.load(x_rows + inputs[:, None], mask=x_mask, other=0.0)
            total = add_scaled_dot(total, w, x, scale, WIDEN)
    return total


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_chunks(
    x_rows: tl.tensor,
    real_row: tl.tensor,
    w_rows: tl.tensor,
    scale_rows: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    SPREADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The sum over the program's chunk with SPREADS, otherwise of all chunks in order. One chunk
    needs no second sum, which takes registers."""
    if SPREADS or CHUNK >= IN:
        first = tl.program_id(1) * CHUNK
        total = _sum_chunk(
            x_rows, real_row, w_rows, scale_rows, first, num_inputs,
            IN, GROUP, WIDEN, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK,
        )  # fmt: skip
    else:
        total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for first in tl.range(0, num_inputs, CHUNK):
            total += _sum_chunk(
                x_rows, real_row, w_rows, scale_rows, first, num_inputs,
                IN, GROUP, WIDEN, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK,
            )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["num_rows", "num_inputs"])  # type: ignore[untyped-decorator]  # triton has no types
def scaled_linear_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    output_stride: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SPREADS: tl.constexpr,
    ADDS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (tiles, chunks or 1). With SPREADS the output is `[chunks, T, N]` float32, without the
    bias. With ADDS the result is added to what the output holds. Of a 4-bit weight GROUP inputs
    share a word; GROUP is 0 for FP8.

    `num_inputs` is IN, but not a compile-time constant, so that the loop is pipelined for any
    size."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    rows, outs = tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    # Rows past the end are not read: few rows would read as much of x as of the weight. Outputs
    # past the edge wrap around and are not stored, so that loads of weights need no mask.
    real_row, weight_row = rows < num_rows, (outs % OUT).to(tl.int64)
    x_rows = x + rows.to(tl.int64)[None, :] * x_stride
    w_rows = weight + weight_row[:, None] * (tl.cdiv(IN, BLOCK) * (BLOCK // 2) if GROUP else IN)
    IN_BLOCKS: tl.constexpr = GROUP == 0 or scales.dtype.element_ty == tl.uint32
    scale_rows = scales + weight_row * tl.cdiv(IN, BLOCK if IN_BLOCKS else GROUP)
    total = _sum_chunks(
        x_rows, real_row, w_rows, scale_rows, num_inputs,
        IN, SPREADS, GROUP, WIDEN, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK,
    )  # fmt: skip
    if SPREADS:
        output += tl.program_id(1).to(tl.int64) * num_rows * OUT
    if bias is not None:
        total += tl.load(bias + outs, mask=outs < OUT, other=0.0).to(tl.float32)[:, None]
    pointers = output + rows.to(tl.int64)[None, :] * output_stride + outs[:, None]
    real = real_row[None, :] & (outs < OUT)[:, None]
    if ADDS:
        total += tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real)
