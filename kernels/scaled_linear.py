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

from tllm_spec.kernels.batch_invariant_linear import OUTPUTS_ADDED, Tiling
from tllm_spec.kernels.dequantise import BLOCK as BLOCK
from tllm_spec.kernels.dequantise import check_scaled as check_scaled
from tllm_spec.kernels.dequantise import dequantised as dequantised
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.int4_weights import (
    check_int4,
    int4_dequantised,
    kernel_words,
    num_sums,
    unpacked,
)
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.scaled_linear_slices import multiply_slices, slice_outputs
from tllm_spec.kernels.shared_memory import (
    HOPPER_BYTES,
    rows_that_fit,
    shared_memory_bytes,
    stages_that_fit,
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


@with_kernel("scaled_linear.tiled_scaled_linear")
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
    from tllm_spec.kernels.batch_invariant_linear_triton import add_chunks_kernel
    from tllm_spec.kernels.scaled_linear_triton import scaled_linear_kernel

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
