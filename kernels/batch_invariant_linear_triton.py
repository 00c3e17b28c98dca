"""The Triton kernels of batch_invariant_linear.py, which describes inputs and outputs. Importing
this file imports Triton.

A tile is `[outputs, rows]`, W x^T. The weight is the larger operand of the tensor cores, so every
number of rows uses the same kind of instruction (m64nNk16 on Hopper).

Bytes: the weight once per `rows` rows and x once per `outputs` outputs."""

import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch_triton import launch_dependents, wait_for_previous

# Adjacent programs take tiles of 8 row tiles, to share weights and rows in the L2 cache.
ROW_TILES_TOGETHER = tl.constexpr(8)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def tile_of_program(
    num_rows: tl.tensor, OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The rows and outputs of the program's tile, also past the edges."""
    row_tiles, out_tiles = tl.cdiv(num_rows, BLOCK_ROWS), tl.cdiv(OUT, BLOCK_OUT)
    together = ROW_TILES_TOGETHER * out_tiles
    first_tile = tl.program_id(0) // together * ROW_TILES_TOGETHER
    num_together = tl.minimum(row_tiles - first_tile, ROW_TILES_TOGETHER)
    within = tl.program_id(0) % together
    rows = (first_tile + within % num_together) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = within // num_together * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    return rows, outs


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _sum_chunk(
    x_rows: tl.tensor,
    w_rows: tl.tensor,
    first: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> tl.tensor:
    """`[BLOCK_OUT, BLOCK_ROWS]` float32: sum over inputs `first` to `first + CHUNK`, in order."""
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, num_inputs), BLOCK_IN):
        inputs = start + tl.arange(0, BLOCK_IN)
        if IN % BLOCK_IN == 0:
            w = tl.load(w_rows + inputs[None, :])
            x = tl.load(x_rows + inputs[:, None])
        else:
            w = tl.load(w_rows + inputs[None, :], mask=(inputs < IN)[None, :], other=0.0)
            x = tl.load(x_rows + inputs[:, None], mask=(inputs < IN)[:, None], other=0.0)
        if WIDEN:
            w, x = w.to(tl.float32), x.to(tl.float32)
        total = tl.dot(w, x, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows", "num_inputs"])  # type: ignore[untyped-decorator]  # triton has no types
def linear_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    num_rows: tl.tensor,
    num_inputs: tl.tensor,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SPREADS: tl.constexpr,
    WIDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
) -> None:
    """Grid (tiles, chunks or 1). With SPREADS the output is `[chunks, T, N]` float32, without the
    bias.

    `num_inputs` is IN, but not a compile-time constant. If the compiler knew that the loop runs
    once, it would start the accumulation with the bias, which is another order."""
    rows, outs = tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    # Rows and outputs past the edge wrap around and are not stored, so the loads need no masks.
    x_rows = x + (rows % num_rows).to(tl.int64)[None, :] * x_stride
    w_rows = weight + (outs % OUT).to(tl.int64)[:, None] * IN

    if SPREADS:
        first = tl.program_id(1) * CHUNK
        total = _sum_chunk(
            x_rows, w_rows, first, num_inputs, IN, WIDEN, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN
        )
        output += tl.program_id(1).to(tl.int64) * num_rows * OUT
    else:
        total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
        for first in tl.range(0, num_inputs, CHUNK):
            total += _sum_chunk(
                x_rows, w_rows, first, num_inputs, IN, WIDEN, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN
            )
        if bias is not None:
            total += tl.load(bias + outs, mask=outs < OUT, other=0.0).to(tl.float32)[:, None]
    pointers = output + rows.to(tl.int64)[None, :] * OUT + outs[:, None]
    real = (rows < num_rows)[None, :] & (outs < OUT)[:, None]
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]  # triton has no types
def add_chunks_kernel(
    parts: tl.tensor,
    row_scales: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    output_stride: tl.tensor,
    num_rows: tl.tensor,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    ROUNDS: tl.constexpr = False,
) -> None:
    """Grid (rows, blocks of outputs). Adds the chunks in order, multiplies the sum by the row's
    scale if there are any, and adds the bias, and with ADDS what the output holds; with ROUNDS it
    rounds before."""
    wait_for_previous(PDL)
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    outs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = outs < OUT
    total = tl.zeros([BLOCK], tl.float32)
    for chunk in range(CHUNKS):
        total += tl.load(parts + (chunk * num_rows + row) * OUT + outs, mask=real, other=0.0)
    if row_scales is not None:
        total = tl.fma(total, tl.broadcast_to(tl.load(row_scales + row), [BLOCK]), 0.0)
    if bias is not None:
        total += tl.load(bias + outs, mask=real, other=0.0).to(tl.float32)
    pointers = output + row * output_stride + outs
    if ROUNDS:
        total = total.to(output.dtype.element_ty).to(tl.float32)
    if ADDS:
        total += tl.load(pointers, mask=real, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real)
