"""The Triton kernel of grouped_gemm.py, which describes inputs and outputs. Importing this file
imports Triton.

A tile is `[outputs, rows]`, W x^T. The weight is the larger operand of the tensor cores, so every
number of rows uses the same kind of instruction (m64nNk16 on Hopper) and sums the inputs in the
same order."""

import triton
import triton.language as tl

from tllm_spec.kernels.gemm.batch_invariant_linear import sum_inputs
from tllm_spec.kernels.gemm.fp8_linear import scaled, sum_codes
from tllm_spec.kernels.gemm.norms import activation_slope
from tllm_spec.kernels.launch import begin, launch_dependents, wait_for_previous


@triton.jit
def _swiglu(
    gate_up: tl.tensor, factor: tl.tensor, LIMIT: tl.constexpr, IS_GELU: tl.constexpr,
    SLOPE: tl.constexpr, HALF: tl.constexpr, BLOCK_ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`[2 * HALF, BLOCK_ROWS]`, gates first, to `[HALF, BLOCK_ROWS]`; `factor` multiplies both."""
    pairs = tl.reshape(gate_up, [2, HALF, BLOCK_ROWS])
    gate, up = tl.split(tl.permute(pairs, [1, 2, 0]))
    gate, up = gate * factor, up * factor
    # exp(-gate) is infinite for gates below -88; the quotient is then -0, the right limit.
    if LIMIT is None:
        activated = gate / (1.0 + tl.exp(-activation_slope(gate, IS_GELU))) * up
    else:
        gate, up = tl.minimum(gate, LIMIT), tl.clamp(up, -LIMIT, LIMIT)
        activated = gate / (1.0 + tl.exp(-SLOPE * gate)) * (up + 1.0)
    return activated


@triton.jit
def _outputs_of_tile(
    first: tl.tensor, OUT: tl.constexpr, GATED: tl.constexpr, BLOCK_OUT: tl.constexpr
) -> tl.tensor:
    """The weight's rows, `[BLOCK_OUT]`. Those past the edge repeat others and are not stored, so
    that loads of weights need no mask."""
    outs = tl.arange(0, BLOCK_OUT)
    if GATED:  # the first half of a tile has gates, the second the ups of the same outputs
        HALF: tl.constexpr = BLOCK_OUT // 2
        return outs // HALF * OUT + (first + outs % HALF) % OUT
    return (first + outs) % OUT


@triton.jit
def _sum_tile(
    x: tl.tensor, x_scales: tl.tensor, x_scales_stride: tl.tensor, x_row: tl.tensor,
    real_row: tl.tensor, weight: tl.tensor, scales: tl.tensor, expert: tl.tensor,
    out_row: tl.tensor, num_inputs: tl.tensor, IN: tl.constexpr, ALL_OUT: tl.constexpr,
    GROUP: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, WIDEN: tl.constexpr,
    ADDED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`[BLOCK_OUT, BLOCK_ROWS]` float32, without a bias. ALL_OUT: outputs of an expert."""
    ROW: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN * (BLOCK_IN // 2) if GROUP else IN
    x_rows = x + x_row.to(tl.int64)[None, :] * IN
    w_rows = weight + (expert * ALL_OUT + out_row)[:, None] * ROW
    if x_scales is not None:
        BLOCKS: tl.constexpr = (IN + BLOCK_IN - 1) // BLOCK_IN if W_BLOCKS else 1
        scale_rows = scales + expert * (ALL_OUT * BLOCKS) + out_row
        total = sum_codes(
            x_rows, x_scales + x_row, x_scales_stride, real_row, w_rows, scale_rows, ALL_OUT,
            0, num_inputs, IN, X_BLOCKS, W_BLOCKS, WIDEN, ADDED, IN,
            BLOCK_ROWS, BLOCK_OUT, BLOCK_IN,
        )  # fmt: skip
        if not X_BLOCKS:
            total = scaled(total, tl.load(x_scales + x_row, mask=real_row, other=0.0)[None, :])
    else:
        scale_rows = None
        if scales is not None:
            IN_BLOCKS: tl.constexpr = GROUP == 0 or scales.dtype.element_ty == tl.uint32
            COLUMNS: tl.constexpr = tl.cdiv(IN, BLOCK_IN if IN_BLOCKS else GROUP)
            scale_rows = scales + (expert * ALL_OUT + out_row) * COLUMNS
        total = sum_inputs(
            x_rows, real_row, w_rows, scale_rows, 0, num_inputs, IN, GROUP, WIDEN, BLOCK_IN
        )
    return total


@triton.jit(do_not_specialize=["room", "num_inputs", "x_scales_stride"])
def grouped_gemm_kernel(
    x: tl.tensor, x_scales: tl.tensor, x_scales_stride: tl.tensor,
    weight: tl.tensor, scales: tl.tensor, bias: tl.tensor,
    input_weights: tl.tensor, output: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor,
    room: tl.tensor, num_inputs: tl.tensor,
    IN: tl.constexpr, OUT: tl.constexpr, TOP_K: tl.constexpr, IS_SORTED: tl.constexpr,
    GATED: tl.constexpr, LIMIT: tl.constexpr, IS_GELU: tl.constexpr, SLOPE: tl.constexpr,
    GROUP: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr, WIDEN: tl.constexpr,
    ADDED: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (blocks of rows x tiles of outputs); a block's tiles are adjacent. `num_inputs` is IN,
    but not a compile-time constant, so that the loop is pipelined for any size. With x_scales x and
    weights are FP8. X_BLOCKS, W_BLOCKS: whether their scales belong to BLOCK_IN inputs of a row,
    not to the row."""
    wait_for_previous(PDL)
    WIDTH: tl.constexpr = BLOCK_OUT // 2 if GATED else BLOCK_OUT
    ALL_OUT: tl.constexpr = 2 * OUT if GATED else OUT
    TILES: tl.constexpr = (OUT + WIDTH - 1) // WIDTH
    block, first_out = tl.program_id(0) // TILES, tl.program_id(0) % TILES * WIDTH
    expert = tl.load(blocks + block).to(tl.int64)
    first, end = block, block + 1
    if IS_SORTED:
        number = tl.load(num_blocks)
        first, end = tl.load(blocks + room + block), tl.load(blocks + 2 * room + block)
        if block >= number:
            return
    rows = first + tl.arange(0, BLOCK_ROWS)
    # Rows past the end are not read: few tokens would read as much of x as of the weights.
    real_row, row = rows < end, tl.minimum(rows, end - 1)
    assignment = tl.load(order + row) if IS_SORTED else row
    out_row = _outputs_of_tile(first_out, OUT, GATED, BLOCK_OUT)
    total = _sum_tile(
        x, x_scales, x_scales_stride, assignment // TOP_K if GATED else row, real_row,
        weight, scales, expert, out_row, num_inputs,
        IN, ALL_OUT, GROUP, X_BLOCKS, W_BLOCKS, WIDEN, ADDED, BLOCK_ROWS, BLOCK_OUT, BLOCK_IN,
    )  # fmt: skip
    launch_dependents(PDL)  # earlier the next kernel's programs would crowd where there is room
    if bias is not None:
        total += tl.load(bias + expert * ALL_OUT + out_row).to(tl.float32)[:, None]
    columns, output_row = first_out + tl.arange(0, WIDTH), assignment
    if GATED:
        factor = 1.0 if input_weights is None else tl.load(input_weights + assignment)[None, :]
        total, output_row = _swiglu(total, factor, LIMIT, IS_GELU, SLOPE, WIDTH, BLOCK_ROWS), row
    pointers = output + output_row.to(tl.int64)[None, :] * OUT + columns[:, None]
    real = real_row[None, :] & (columns < OUT)[:, None]
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real)


@triton.jit
def _add_tile(
    total: tl.tensor, x: tl.tensor, w_rows: tl.tensor, x_scale: tl.tensor, w_scale: tl.tensor,
    WIDEN: tl.constexpr, ADDED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """total `[rows, outputs]` plus x times a tile of the weight. x_scale `[rows]`, w_scale `[]`."""
    w = tl.load(w_rows)
    if WIDEN:
        x, w = x.to(tl.float32), w.to(tl.float32)
    product = tl.dot(x, tl.trans(w), input_precision="ieee", max_num_imprecise_acc=ADDED)
    return tl.fma(product, tl.broadcast_to((w_scale * x_scale)[:, None], total.shape), total)


@triton.jit(do_not_specialize=["room", "num_inputs", "x_scales_stride"])
def grouped_tiles_kernel(
    x: tl.tensor, x_scales: tl.tensor, x_scales_stride: tl.tensor,
    weight: tl.tensor, scales: tl.tensor, output: tl.tensor,
    order: tl.tensor, blocks: tl.tensor, num_blocks: tl.tensor,
    room: tl.tensor, num_inputs: tl.tensor,
    IN: tl.constexpr, OUT: tl.constexpr, TOP_K: tl.constexpr, GATED: tl.constexpr,
    WIDEN: tl.constexpr, ADDED: tl.constexpr, BLOCK_ROWS: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """As `grouped_gemm_kernel`, with two tiles of outputs: gates and ups, or neighbours. A tile is
    `[rows, outputs]`: a thread has the scales of two rows, and that of the tile is one number, so
    that registers hold more sums. Tensor cores add in the same order in both kernels, so a row has
    the same bits."""
    begin(PDL)
    WIDTH: tl.constexpr = TILE if GATED else 2 * TILE
    SECOND: tl.constexpr = OUT if GATED else TILE  # outputs between the two tiles
    ALL_OUT: tl.constexpr = 2 * OUT if GATED else OUT
    block, first_out = tl.program_id(0) // (OUT // WIDTH), tl.program_id(0) % (OUT // WIDTH) * WIDTH
    number = tl.load(num_blocks)
    expert = tl.load(blocks + block).to(tl.int64)
    first, end = tl.load(blocks + room + block), tl.load(blocks + 2 * room + block)
    if block >= number:
        return
    rows = first + tl.arange(0, BLOCK_ROWS)
    real_row, row = rows < end, tl.minimum(rows, end - 1)
    assignment = tl.load(order + row)
    x_row = assignment // TOP_K if GATED else row
    x_rows, outs = x + x_row.to(tl.int64)[:, None] * IN, first_out + tl.arange(0, TILE)
    w_rows = weight + (expert * ALL_OUT + outs)[:, None] * IN
    scale = scales + expert * (ALL_OUT * (IN // TILE)) + first_out
    total = tl.zeros([BLOCK_ROWS, TILE], tl.float32)
    second = tl.zeros([BLOCK_ROWS, TILE], tl.float32)
    for start in tl.range(0, num_inputs, TILE):
        inputs, group = start + tl.arange(0, TILE), start // TILE
        x_scale = tl.load(x_scales + group * x_scales_stride + x_row, mask=real_row, other=0.0)
        own = tl.load(x_rows + inputs[None, :], mask=real_row[:, None], other=0.0)
        own_w, own_scale = w_rows + inputs[None, :], scale + group * ALL_OUT
        total = _add_tile(total, own, own_w, x_scale, tl.load(own_scale), WIDEN, ADDED)
        second_scale = tl.load(own_scale + SECOND)
        second = _add_tile(second, own, own_w + SECOND * IN, x_scale, second_scale, WIDEN, ADDED)
    output_row = row if GATED else assignment
    pointers = output + output_row.to(tl.int64)[:, None] * OUT + outs[None, :]
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * second
    else:
        tl.store(pointers + TILE, second.to(output.dtype.element_ty), mask=real_row[:, None])
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real_row[:, None])
