"""Linear layer of a weight in FP8 or 4 bits: `y[t, n] = sum over blocks b of scales[n, b] * sum
over k in b of x[t, k] * weight[n, k]`, with a scale for each output and each BLOCK inputs of an FP8
weight, or each `group` inputs of a weight of 4 bits, whose numbers are codes less zero points
(int4_weights.py). A batch-invariant Triton kernel if Triton is available, otherwise the plain-torch
reference, which is not batch-invariant. Where rows need not be batch-invariant either, many of them
are multiplied by torch's GEMM with slices of the weight, each dequantised just before.

The kernel leaves activations in their type, to which E4M3 and codes convert exactly. Its order of
sums depends on the weight's shape only, as in batch_invariant_linear.py: blocks are added in order
within chunks, and the chunks' sums in order. A weight with few outputs has several chunks, so that
a few rows can be spread over the whole device."""

import math
from dataclasses import replace

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.gemm.batch_invariant_linear import (
    OUTPUTS_ADDED,
    Tiling,
    sum_chunks,
    tile_of_program,
)
from tllm_spec.kernels.gemm.fp8_numbers import BLOCK as BLOCK
from tllm_spec.kernels.gemm.fp8_numbers import check_scaled as check_scaled
from tllm_spec.kernels.gemm.fp8_numbers import dequantise_rows
from tllm_spec.kernels.gemm.fp8_numbers import dequantised as dequantised
from tllm_spec.kernels.gemm.int4_weights import (
    check_int4,
    dequantise_int4,
    int4_dequantised,
    kernel_words,
    num_sums,
    unpacked,
)
from tllm_spec.kernels.launch import (
    HOPPER_BYTES,
    launch_dependents,
    programmatic_launch,
    rows_that_fit,
    shared_memory_bytes,
    stages_that_fit,
    wait_for_previous,
)

# Outputs of a tile of few rows, from which the chunks follow.
OUTPUTS = 64
# A GEMM of few rows has so many: nearly two per multiprocessor of an H100 or H200.
MIN_PROGRAMS = 256
# A GEMM of 4-bit weights has more, since its tiles take less time: from it the chunks follow.
INT4_PROGRAMS = 448
# Of more rows than SPLIT_FROM two programs run on each of an H100's multiprocessors.
SPLIT_FROM, PROGRAMS_AT_ONCE = 64, 264
WIDE_FEATURES = 16384  # with 128 of them a program, most multiprocessors have one
MIN_CHUNK = 1024  # fewer blocks would not fill a program's pipeline
# The kernel converts a weight once for each tile, of 128 rows at most. Slices are converted once
# for all rows, but for each byte read 2 are written and read again. On an H100 both take as long
# with 256 rows (`python -m benchmarks.fp8 linear`).
MAX_KERNEL_ROWS = 256


def chunk_of(out_features: int, in_features: int, programs: int = MIN_PROGRAMS) -> int:
    """Inputs of a chunk, a multiple of BLOCK. It decides the order of sums."""
    return _chunk(-(-programs // -(-out_features // OUTPUTS)), in_features)


def chunk_of_tiles(tiles: int, in_features: int) -> int:
    """The same for many rows that need not be batch-invariant: their programs run at once."""
    return _chunk(max(PROGRAMS_AT_ONCE // tiles, 1), in_features)


def _chunk(wanted: int, in_features: int) -> int:
    """wanted: chunks."""
    chunks = min(wanted, -(-in_features // MIN_CHUNK))
    return -(-in_features // (chunks * BLOCK)) * BLOCK


def tiling_of(num_rows: int, dtype: torch.dtype, shared_bytes: int = HOPPER_BYTES) -> Tiling:
    """Few rows stream the weight: a program has 32 KiB of it in flight, and three or four programs
    share a multiprocessor. shared_bytes: that a program may have (shared_memory.py)."""
    if dtype == torch.float32:  # no tensor cores
        return Tiling(16, OUTPUTS, 4, 2) if num_rows <= 16 else Tiling(64, 64, 8, 2)
    if num_rows <= 32:
        return Tiling(16 if num_rows <= 16 else 32, OUTPUTS, 4, 5)
    rows, outputs = 64 if num_rows <= 64 else 128, 128
    stage_bytes = BLOCK * (outputs + 2 * rows)  # of a weight in FP8 and rows of 16 bits
    return Tiling(rows, outputs, 8, stages_that_fit(4, stage_bytes, shared_bytes))


def int4_tiling_of(
    num_rows: int, out_features: int, dtype: torch.dtype, shared_bytes: int = HOPPER_BYTES
) -> Tiling:
    """The same for weights of 4 bits. Several programs on a multiprocessor, which convert codes in
    turn, are faster than deep pipelines."""
    if dtype == torch.float32:
        return tiling_of(num_rows, dtype)
    rows, outputs, num_warps, num_stages = next(
        tiling for most, tiling in _INT4_TILINGS if num_rows <= most
    )
    if outputs == OUTPUTS and rows <= 32 and out_features >= WIDE_FEATURES:
        outputs *= 2  # which reads x half as often
    stage_bytes = 64 * (outputs + 4 * rows) + 8 * outputs  # of codes, rows of 16 bits, and words
    return Tiling(rows, outputs, num_warps, stages_that_fit(num_stages, stage_bytes, shared_bytes))


# By the largest number of rows, as measured on an H100.
_INT4_TILINGS = (
    (16, (16, 128, 4, 4)),
    (32, (32, 64, 4, 3)),
    (64, (64, 128, 4, 3)),
    (MAX_KERNEL_ROWS, (128, 64, 4, 3)),
    (math.inf, (128, 128, 8, 4)),
)


@with_kernel("tiled_scaled_linear")
def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: int = 0,
    add_to: torch.Tensor | None = None,
    invariant: bool = True,
) -> torch.Tensor:
    """Sums in float32 and rounds once, after the bias and `add_to`.

    With `invariant` a row has the same bits in every batch. Without it more than SPLIT_FROM rows
    have other chunks of 4 bits, and `multiply_slices`, which rounds more often, multiplies more
    than MAX_KERNEL_ROWS rows in 16 bits.

    Args:
        x: `[T, K]` bfloat16, float16 or float32, any stride between rows.
        weight: `[N, K]` float8_e4m3fn, or `packed` codes of 4 bits, contiguous.
        scales: `[N, ceil(K / 128)]` float32, or `group_words` `[N, ceil(K / group)]`, contiguous.
        bias: `[N]`.
        group: inputs that share a word of codes of 4 bits: 16, 32, 64 or 128; 0 for FP8.
        add_to: `[T, N]` as x, any stride between rows: the output is added to it, in place.

    Returns:
        `[T, N]` as x: `add_to`, or a new tensor.
    """
    if group:
        matrix = int4_dequantised(unpacked(weight, x.shape[1]), scales, group, torch.float32)
    else:
        matrix = dequantised(weight, scales, torch.float32)
    output = x.float().mm(matrix.t())
    for added in (bias, add_to):
        if added is not None:
            output += added
    return output.to(x.dtype) if add_to is None else add_to.copy_(output)


def tiled_scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: int = 0,
    add_to: torch.Tensor | None = None,
    invariant: bool = True,
) -> torch.Tensor:
    """The kernels of `scaled_linear`."""
    (num_rows, in_features), features, adds = x.shape, len(weight), add_to is not None
    output = x.new_empty(num_rows, features) if add_to is None else add_to
    if num_rows > MAX_KERNEL_ROWS and x.dtype != torch.float32 and not invariant:
        size = slice_outputs(num_rows, features, in_features, has_sums=adds or bias is not None)
        multiply_slices(x, weight, scales, bias, output, size, adds=adds, group=group)
    elif num_rows:
        own = x.dtype, shared_memory_bytes(x.device)
        tiling = int4_tiling_of(num_rows, features, *own) if group else tiling_of(num_rows, *own)
        if group:
            rows = rows_that_fit(tiling.rows, num_sums(scales, group, x.dtype), x.device)
            tiling = replace(tiling, rows=rows)
        tiles = -(-num_rows // tiling.rows) * -(-features // tiling.outputs)
        may_split = group > 0 and not invariant and num_rows > SPLIT_FROM
        launch_scaled_linear(
            x, weight, scales, bias, output, tiling,
            spreads=tiles < MIN_PROGRAMS, adds=adds, group=group,
            chunk=chunk_of_tiles(tiles, in_features) if may_split else 0,
        )  # fmt: skip
    return output


def launch_scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    tiling: Tiling,
    *,
    spreads: bool,
    adds: bool,
    group: int = 0,
    chunk: int = 0,
) -> None:
    """spreads: whether each chunk of a tile has its own program, if there are several. The chunks'
    sums are then written and read again as float32. adds: whether to add to what `output` holds.
    group: as in `scaled_linear`. chunk: inputs of a chunk; 0: as for any
    number of rows."""
    from tllm_spec.kernels.gemm.batch_invariant_linear import add_chunks_kernel

    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    if group:
        check_int4(weight, scales, group, in_features)
    else:
        check_scaled(weight, scales)
        assert weight.shape[1] == in_features
    assert x.stride(1) == 1 == output.stride(1)
    assert output.shape == (num_rows, out_features) and output.dtype == x.dtype
    programs = INT4_PROGRAMS if group else MIN_PROGRAMS
    chunk = chunk or chunk_of(out_features, in_features, programs)
    pdl = programmatic_launch(x.device)
    num_chunks = -(-in_features // chunk)
    spreads = spreads and num_chunks > 1
    parts = output
    if spreads:
        shape = (num_chunks, num_rows, out_features)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles = -(-num_rows // tiling.rows) * -(-out_features // tiling.outputs)
    scaled_linear_kernel[(tiles, num_chunks if spreads else 1)](
        x, x.stride(0), weight, kernel_words(scales), None if spreads else bias,
        parts, parts.stride(-2), num_rows, in_features,
        IN=in_features,
        OUT=out_features,
        SPREADS=spreads,
        ADDS=adds and not spreads,
        GROUP=group,
        WIDEN=x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        CHUNK=chunk,
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK=BLOCK,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl,
    )  # fmt: skip
    if spreads:
        add_chunks_kernel[(num_rows, -(-out_features // OUTPUTS_ADDED))](
            parts, None, bias, output, output.stride(0), num_rows,
            OUT=out_features, CHUNKS=num_chunks, ADDS=adds, BLOCK=OUTPUTS_ADDED, **pdl,
        )  # fmt: skip


# As in batch_invariant_linear.py a tile is `[outputs, rows]`, W x^T. The weight goes from
# shared memory to registers, where it is converted, and from there to the tensor cores.


@triton.jit(do_not_specialize=["num_rows", "num_inputs"])
def scaled_linear_kernel(
    x: tl.tensor, x_stride: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor,
    output: tl.tensor, output_stride: tl.tensor, num_rows: tl.tensor, num_inputs: tl.tensor,
    IN: tl.constexpr, OUT: tl.constexpr, SPREADS: tl.constexpr, ADDS: tl.constexpr,
    GROUP: tl.constexpr, WIDEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
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
    # One chunk needs no second sum, which takes registers.
    total = sum_chunks(
        x_rows, real_row, w_rows, scale_rows, num_inputs,
        SPREADS or CHUNK >= IN, IN, GROUP, WIDEN, CHUNK, BLOCK,
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


# Many rows by a quantised weight, with torch's GEMM: a slice of the weight's rows is dequantised
# to a scratch tensor, multiplied, and followed by the next slice. Most weights are one slice: on
# an H100, slices that stay in the L2 cache were not faster.


MAX_BYTES = 128 << 20  # of each scratch tensor: a slice's weights, and its float32 sums
SLICE_OUTPUTS = 128  # a slice has a multiple of them


def slice_outputs(num_rows: int, out_features: int, in_features: int, *, has_sums: bool) -> int:
    """Outputs of a slice: of as few and as equal ones as MAX_BYTES allows. has_sums: whether
    something is added to the product, which needs float32 sums."""
    output_bytes = max(2 * in_features, 4 * num_rows if has_sums else 0)
    most = max(MAX_BYTES // (output_bytes * SLICE_OUTPUTS), 1) * SLICE_OUTPUTS
    number = -(-out_features // most)
    return -(-out_features // (number * SLICE_OUTPUTS)) * SLICE_OUTPUTS


def multiply_slices(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    size: int,
    *,
    adds: bool,
    group: int = 0,
) -> None:
    """Inputs and outputs are `launch_scaled_linear`'s. size: rows of the weight in a slice.

    A slice's weights are rounded to x's type. Results are rounded once, after `bias` and what the
    output held have been added in float32. torch may let cuBLAS add partial sums in 16 bits
    (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`)."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    assert x.stride(1) == 1 == output.stride(1) and output.shape == (num_rows, out_features)
    scratch = x.new_empty(min(size, out_features), in_features)
    for first in range(0, out_features, size):
        own = slice(first, first + size)
        part = output[:, own]  # torch passes its row stride to cuBLAS, so nothing is copied
        matrix = scratch[: part.shape[1]]
        if group:
            dequantise_int4(weight[own], scales[own], group, matrix)
        else:
            dequantise_rows(weight[own], scales[own], matrix)
        if not adds and bias is None:
            torch.mm(x, matrix.t(), out=part)
            continue
        sums = _float32_product(x, matrix)
        if bias is not None:
            sums += bias[own]
        if adds:
            torch.add(sums, part, out=part)
        else:
            part.copy_(sums)
        del sums  # the next slice's take their memory


def _float32_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x `[T, K]` times matrix `[N, K]`, not rounded."""
    if x.is_cuda:
        return torch.mm(x, matrix.t(), out_dtype=torch.float32)
    return x.float().mm(matrix.float().t())  # CPUs have no GEMM of this kind
