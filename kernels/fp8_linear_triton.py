"""The Triton kernel of fp8_linear.py, which describes inputs and outputs. Importing this file
imports Triton.

A tile is `[outputs, rows]`, W x^T, as in scaled_linear_triton.py; both operands go from shared
memory to FP8 tensor cores. The number of inputs is also an argument that is not a compile-time
constant, so that the loop is pipelined for any size."""

import triton
import triton.language as tl

from tllm_spec.kernels.batch_invariant_linear_triton import tile_of_program
from tllm_spec.kernels.programmatic_launch_triton import launch_dependents, wait_for_previous


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _fetch_weights(
    weight: tl.tensor,
    num_rows: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    FETCHED: tl.constexpr,
) -> None:
    """Fetch the first blocks of the program's weights into the L2 cache. They do not depend on the
    previous kernel, so they are read while it runs."""
    _, outs = tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    inputs = tl.program_id(1) * CHUNK + tl.arange(0, FETCHED) * BLOCK
    rows = weight + (outs % OUT).to(tl.int64)[:, None] * IN
    pointers = rows + tl.minimum(inputs, IN - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def scaled(total: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The product, which the compiler does not contract with an addition."""
    return tl.fma(total, tl.broadcast_to(scale, total.shape), 0.0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _scale(pointers: tl.tensor, real: tl.tensor, IS_SCALED: tl.constexpr) -> tl.tensor:
    """A block's scales, or 1."""
    if IS_SCALED:
        return tl.load(pointers, mask=real)
    return tl.full(pointers.shape, 1.0, tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def sum_codes(
    x_rows: tl.tensor,
    x_scale_rows: tl.tensor,
    x_scale_stride: tl.tensor,
    real_row: tl.tensor,
    w_rows: tl.tensor,
    w_scale_rows: tl.tensor,
    w_scale_stride: tl.tensor,
    first: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    X_BLOCKS: tl.constexpr,
    W_BLOCKS: tl.constexpr,
    WIDEN: tl.constexpr,
    ADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_OUT, BLOCK_ROWS]` float32: sum over inputs `first` to `first + CHUNK`, in order.
    ADDED: inputs that tensor cores add (fp8_linear.py)."""
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    # Scales are read a block ahead, so that no product waits for them.
    block, last = first // BLOCK, tl.cdiv(num_inputs, BLOCK) - 1
    w_scale = _scale(w_scale_rows + block * w_scale_stride, None, W_BLOCKS)
    x_scale = _scale(x_scale_rows + block * x_scale_stride, real_row, X_BLOCKS)
    for start in tl.range(first, tl.minimum(first + CHUNK, num_inputs), BLOCK):
        block = tl.minimum(start // BLOCK + 1, last)
        next_w = _scale(w_scale_rows + block * w_scale_stride, None, W_BLOCKS)
        next_x = _scale(x_scale_rows + block * x_scale_stride, real_row, X_BLOCKS)
        inputs = start + tl.arange(0, BLOCK)
        if IN % BLOCK == 0:
            w = tl.load(w_rows + inputs[None, :])
            x = tl.load(x_rows + inputs[:, None], mask=real_row[None, :], other=0.0)
        else:
            w = tl.load(w_rows + inputs[None, :], mask=(inputs < IN)[None, :], other=0.0)
            x_mask = (inputs < IN)[:, None] & real_row[None, :]
            x = tl.load(x_rows + inputs[:, None], mask=x_mask, other=0.0)
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        if not X_BLOCKS and not W_BLOCKS:
            total = tl.dot(w, x, total, input_precision="ieee", max_num_imprecise_acc=ADDED)
        else:
            product = tl.dot(w, x, input_precision="ieee", max_num_imprecise_acc=ADDED)
            # An explicit FMA has the same bits wherever the compiler might contract and where not.
            total = tl.fma(product, w_scale[:, None] * x_scale[None, :], total)
        w_scale, x_scale = next_w, next_x
    if not W_BLOCKS:
        total = scaled(total, tl.load(w_scale_rows)[:, None])
    return total


@triton.jit(do_not_specialize=["num_rows", "num_inputs", "x_scales_stride"])  # type: ignore[untyped-decorator]  # triton has no types
def fp8_linear_kernel(
    x: tl.tensor, x_scales: tl.tensor, x_scales_stride: tl.tensor, weight: tl.tensor,
    scales: tl.tensor, scales_stride: tl.tensor, scales_block_stride: tl.tensor, bias: tl.tensor,
    output: tl.tensor, output_stride: tl.tensor, num_rows: tl.tensor, num_inputs: tl.tensor,
    IN: tl.constexpr, OUT: tl.constexpr, SPREADS: tl.constexpr, ADDS: tl.constexpr,
    X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, WIDEN: tl.constexpr, ADDED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr,
    FETCHED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles, chunks or 1). With SPREADS the output is `[chunks, T, N]` float32, without bias
    and scales of whole rows of x. With ADDS the rounded result is added to what the output holds.
    X_BLOCKS, W_BLOCKS: whether a scale belongs to BLOCK inputs of a row, not to the row."""
    if PDL:
        _fetch_weights(weight, num_rows, IN, OUT, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK, FETCHED)
    wait_for_previous(PDL)
    launch_dependents(PDL)
    rows, outs = tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    # Rows past the end are not read: few rows would read as much of x as of the weight. Outputs
    # past the edge wrap around and are not stored, so that loads of weights need no mask.
    real_row, weight_row = rows < num_rows, (outs % OUT).to(tl.int64)
    x_rows, x_scale_rows = x + rows.to(tl.int64)[None, :] * IN, x_scales + rows
    w_rows, w_scale_rows = weight + weight_row[:, None] * IN, scales + weight_row * scales_stride
    begin = tl.program_id(1) * CHUNK
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for first in tl.range(begin, begin + CHUNK if SPREADS else num_inputs, CHUNK):
        total += sum_codes(
            x_rows, x_scale_rows, x_scales_stride, real_row, w_rows, w_scale_rows,
            scales_block_stride, first, num_inputs,
            IN, X_BLOCKS, W_BLOCKS, WIDEN, ADDED, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK,
        )  # fmt: skip
    if SPREADS:
        output += tl.program_id(1).to(tl.int64) * num_rows * OUT
    elif not X_BLOCKS:
        total = scaled(total, tl.load(x_scale_rows, mask=real_row, other=0.0)[None, :])
    if bias is not None:
        total += tl.load(bias + outs % OUT).to(tl.float32)[:, None]
    real = real_row[None, :] & (outs < OUT)[:, None]
    pointers = output + rows.to(tl.int64)[None, :] * output_stride + outs[:, None]
    if ADDS:
        total = total.to(output.dtype.element_ty).to(tl.float32)
        total += tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real)
