"""Batch-invariant linear layer: `y = x W^T + b` whose row y[t] has the same bits whatever other
rows x has, and how many.

A library chooses the fastest GEMM algorithm for the number of rows, and each algorithm sums in its
own order. Here the order depends on the weight's shape only: the inputs are cut into chunks of
CHUNK, each chunk is summed in order, and the chunks' sums are added in order. The work can be
spread in two ways with the same additions: one program adds all chunks of its tile, or each chunk
has a program and a second launch adds their sums.

The plain-torch reference is torch.mm, which has another order of sums and is not
batch-invariant."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.gemm.int4_weights import add_int4_dot, load_inputs
from tllm_spec.kernels.launch import launch_dependents, wait_for_previous

# Long enough to fill a program's pipeline, short enough that a few rows keep the whole device busy.
CHUNK = 2048
# Inputs that are accumulated at a time. The same for all tilings, because it decides the order.
BLOCK_IN = 64
# With fewer tiles than this (two per multiprocessor of an H200) chunks are spread over programs.
MIN_PROGRAMS = 264
OUTPUTS_ADDED = 1024  # per program of the second launch


@dataclass(frozen=True)
class Tiling:
    """The part of the output that a program computes. It does not change the result's bits; on
    tensor cores this is tested (tests/kernels/test_batch_invariant_linear.py), not documented."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


def tiling_of(num_rows: int, dtype: torch.dtype) -> Tiling:
    if dtype == torch.float32:  # no tensor cores
        return Tiling(16, 64, 4, 3) if num_rows <= 16 else Tiling(64, 64, 8, 2)
    if num_rows <= 64:
        return Tiling(max(16, 1 << (num_rows - 1).bit_length()), 64, 4, 4)
    return Tiling(128, 128, 8, 4)


@with_kernel("tiled_linear")
def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums in float32 and rounds once, after the bias. float32 inputs are not rounded to TF32.

    x: `[T, K]`, any stride between rows; weight: `[N, K]`, contiguous; bias: `[N]`. Returns `[T,
    N]`."""
    return x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def tiled_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The kernel of `batch_invariant_linear`."""
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0])
    tiling = tiling_of(x.shape[0], x.dtype)
    tiles = -(-x.shape[0] // tiling.rows) * -(-weight.shape[0] // tiling.outputs)
    return launch_linear(
        x, weight, bias, tiling, spreads=tiles < MIN_PROGRAMS and x.shape[1] > CHUNK
    )


def launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tiling: Tiling,
    *,
    spreads: bool,
) -> torch.Tensor:
    """spreads: whether each chunk of a tile has its own program. The chunks' sums are then written
    and read again as float32."""

    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    assert weight.shape[1] == in_features and weight.is_contiguous() and x.stride(1) == 1
    output = x.new_empty(num_rows, out_features)
    parts, num_chunks = output, -(-in_features // CHUNK)
    if spreads:
        parts = torch.empty(
            (num_chunks, num_rows, out_features), dtype=torch.float32, device=x.device
        )
    tiles = -(-num_rows // tiling.rows) * -(-out_features // tiling.outputs)
    linear_kernel[(tiles, num_chunks if spreads else 1)](
        x,
        x.stride(0),
        weight,
        None if spreads else bias,
        parts,
        num_rows,
        in_features,
        IN=in_features,
        OUT=out_features,
        SPREADS=spreads,
        WIDEN=x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        CHUNK=CHUNK,
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK_IN=BLOCK_IN,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=True,
    )
    if spreads:
        add_chunks_kernel[(num_rows, -(-out_features // OUTPUTS_ADDED))](
            parts,
            None,
            bias,
            output,
            output.stride(0),
            num_rows,
            OUT=out_features,
            CHUNKS=num_chunks,
            ADDS=False,
            BLOCK=OUTPUTS_ADDED,
            PDL=False,
            enable_fp_fusion=True,
        )
    return output


# A tile is `[outputs, rows]`, W x^T. The weight is the larger operand of the tensor cores, so
# every number of rows uses the same kind of instruction (m64nNk16 on Hopper).
#
# Bytes: the weight once per `rows` rows and x once per `outputs` outputs.


# Adjacent programs take tiles of 8 row tiles, to share weights and rows in the L2 cache.
ROW_TILES_TOGETHER = tl.constexpr(8)


@triton.jit
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


@triton.jit
def load_weights(
    w_rows: tl.tensor, inputs: tl.tensor, IN: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """`[outputs, inputs]` of a weight, 0 after the last input."""
    if IN % BLOCK == 0:
        w = tl.load(w_rows + inputs[None, :])
    else:
        w = tl.load(w_rows + inputs[None, :], mask=(inputs < IN)[None, :], other=0.0)
    return w


@triton.jit
def sum_inputs(
    x_rows: tl.tensor, real_row: tl.tensor, w_rows: tl.tensor, scale_rows: tl.tensor,
    first: tl.tensor, end: tl.tensor, IN: tl.constexpr, GROUP: tl.constexpr, WIDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`[outputs, rows]` float32: sum over inputs `first` to `end`, in order. x_rows `[1, rows]`,
    w_rows `[outputs, 1]` and scale_rows `[outputs]`: where rows begin. Rows of x that are not
    `real_row` are not read. scale_rows: of BLOCK inputs of an FP8 weight, or words of GROUP inputs
    of one of 4 bits; None: of a weight in the type of x."""
    total = tl.zeros([w_rows.shape[0], x_rows.shape[1]], tl.float32)
    for start in tl.range(first, end, BLOCK):
        if GROUP:
            total = add_int4_dot(
                total, x_rows, real_row, w_rows, scale_rows, start, IN, GROUP, BLOCK, WIDEN
            )
        else:
            inputs = start + tl.arange(0, BLOCK)
            if scale_rows is not None:
                scale = tl.load(scale_rows + start // BLOCK)
            w = load_weights(w_rows, inputs, IN, BLOCK)
            x = load_inputs(x_rows, real_row, inputs, IN, BLOCK, WIDEN)
            if scale_rows is not None:
                # By way of float32: the direct conversion to bfloat16 has an eighth of the
                # throughput.
                w = w.to(tl.float32).to(x.dtype)
                product = tl.dot(w, x, input_precision="ieee")
                # An explicit FMA has the same bits wherever the compiler might contract and where
                # not.
                total = tl.fma(product, tl.broadcast_to(scale[:, None], total.shape), total)
            else:
                total = tl.dot(w.to(x.dtype), x, total, input_precision="ieee")
    return total


@triton.jit
def sum_chunks(
    x_rows: tl.tensor, real_row: tl.tensor, w_rows: tl.tensor, scale_rows: tl.tensor,
    num_inputs: tl.tensor, IS_ONE: tl.constexpr, IN: tl.constexpr, GROUP: tl.constexpr,
    WIDEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`sum_inputs` of the program's chunk if it has one, otherwise of all chunks in order."""
    if IS_ONE:
        first = tl.program_id(1) * CHUNK
        end = tl.minimum(first + CHUNK, num_inputs)
        total = sum_inputs(
            x_rows, real_row, w_rows, scale_rows, first, end, IN, GROUP, WIDEN, BLOCK
        )
    else:
        total = tl.zeros([w_rows.shape[0], x_rows.shape[1]], tl.float32)
        for first in tl.range(0, num_inputs, CHUNK):
            end = tl.minimum(first + CHUNK, num_inputs)
            total += sum_inputs(
                x_rows, real_row, w_rows, scale_rows, first, end, IN, GROUP, WIDEN, BLOCK
            )
    return total


@triton.jit(do_not_specialize=["num_rows", "num_inputs"])
def linear_kernel(
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, bias: tl.tensor, output: tl.tensor,
    num_rows: tl.tensor, num_inputs: tl.tensor, IN: tl.constexpr, OUT: tl.constexpr,
    SPREADS: tl.constexpr, WIDEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles, chunks or 1). With SPREADS the output is `[chunks, T, N]` float32, without the
    bias.

    `num_inputs` is IN, but not a compile-time constant. If the compiler knew that the loop runs
    once, it would start the accumulation with the bias, which is another order."""
    rows, outs = tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    # Rows and outputs past the edge wrap around and are not stored, so the loads need no masks.
    x_rows = x + (rows % num_rows).to(tl.int64)[None, :] * x_stride
    w_rows = weight + (outs % OUT).to(tl.int64)[:, None] * IN

    total = sum_chunks(
        x_rows, None, w_rows, None, num_inputs, SPREADS, IN, 0, WIDEN, CHUNK, BLOCK_IN
    )
    if SPREADS:
        output += tl.program_id(1).to(tl.int64) * num_rows * OUT
    elif bias is not None:
        total += tl.load(bias + outs, mask=outs < OUT, other=0.0).to(tl.float32)[:, None]
    pointers = output + rows.to(tl.int64)[None, :] * OUT + outs[:, None]
    real = (rows < num_rows)[None, :] & (outs < OUT)[:, None]
    tl.store(pointers, total.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_rows"])
def add_chunks_kernel(
    parts: tl.tensor, row_scales: tl.tensor, bias: tl.tensor, output: tl.tensor,
    output_stride: tl.tensor, num_rows: tl.tensor, OUT: tl.constexpr, CHUNKS: tl.constexpr,
    ADDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, ROUNDS: tl.constexpr = False,
) -> None:  # fmt: skip
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
