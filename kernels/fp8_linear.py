"""Linear layer of FP8 activations and an FP8 weight: `y[t, n] = sum over blocks b of
code_scales[b, t] * scales[n, b] * sum over k in b of codes[t, k] * weight[n, k]`. A scale belongs
to a block of BLOCK inputs, or to all inputs of a row; then it multiplies the finished sums. A
Triton kernel on FP8 tensor cores if Triton is available, otherwise the plain-torch reference. Both
are batch-invariant.

Products of codes are multiples of 2^-18 up to 2^18, so float64 holds the sum of a block exactly,
whatever the order. FP8 tensor cores sum with fewer bits than float32; each block of 128 inputs, or
with other types than bfloat16 each 32, is added to a float32 sum. The order of these sums depends
on the weight's shape only, as in scaled_linear.py."""

import torch

from tllm_spec.kernels.batch_invariant_linear import OUTPUTS_ADDED, Tiling
from tllm_spec.kernels.dequantise import BLOCK
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.scaled_linear import chunk_of
from tllm_spec.kernels.shared_memory import HOPPER_BYTES, shared_memory_bytes, stages_that_fit

# Up to so many rows a program's tile has all of them.
FEW_ROWS = 64
TENSOR_CORE_INPUTS = 32  # of an instruction
FETCHED = 4  # blocks of weights that a program fetches while the previous kernel runs
# GEMMs of few and of more rows have two programs per multiprocessor of an H100 or H200, or one.
MIN_PROGRAMS, MIN_WIDE_PROGRAMS = 256, 128


def inputs_added(dtype: torch.dtype) -> int:
    """Inputs that tensor cores add before their sum is added to a float32 one, for an output of
    `dtype`. They keep 13 bits below the largest summand, in several instructions one after the
    other fewer than float16 shows."""
    return BLOCK if dtype == torch.bfloat16 else TENSOR_CORE_INPUTS


def tiling_of(num_rows: int, in_blocks: bool, shared_bytes: int = HOPPER_BYTES) -> Tiling:
    """in_blocks: whether activations have scales of blocks; shared_bytes: that a program may have
    (shared_memory.py)."""
    if num_rows <= FEW_ROWS:
        rows = max(16, 1 << (num_rows - 1).bit_length())
        tiling = Tiling(rows, 64, 4, 4 if in_blocks else 5)
    else:
        tiling = Tiling(128, 64, 4, 4) if num_rows <= 512 else Tiling(128, 128, 8, 4)
    stage_bytes = BLOCK * (tiling.rows + tiling.outputs)
    stages = stages_that_fit(tiling.num_stages, stage_bytes, shared_bytes)
    return Tiling(tiling.rows, tiling.outputs, tiling.num_warps, stages)


@with_kernel("fp8_linear.tiled_fp8_linear")
def fp8_linear(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Results are rounded after the bias, and once more after `add_to`, as cuBLASLt does
    (fp8_gemms.py).

    Args:
        codes: `[T, K]` float8_e4m3fn, contiguous.
        code_scales: `[1, T]` of rows or `[ceil(K / 128), T]` of blocks, float32, any stride between
            blocks.
        weight: `[N, K]` float8_e4m3fn, contiguous; for the reference float64 too, which it need
            not convert.
        scales: `[N, 1]` of rows or `[N, ceil(K / 128)]` of blocks, float32, any strides.
        dtype: of the output and of the rest.
        bias: `[N]`.
        add_to: `[T, N]`, any stride between rows: the output is added to it, in place.

    Returns:
        `[T, N]`: `add_to`, or a new tensor.
    """
    wide, matrix = codes.double(), weight.double().t()
    output = wide.new_zeros(len(codes), len(weight))
    num_blocks = -(-codes.shape[1] // BLOCK)
    by_block = code_scales.double().expand(num_blocks, -1), scales.double().expand(-1, num_blocks)
    for block, (of_rows, of_outputs) in enumerate(zip(by_block[0], by_block[1].t(), strict=True)):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        output += wide[:, own].mm(matrix[own]).mul_(of_outputs).mul_(of_rows.unsqueeze(1))
    if bias is not None:
        output += bias
    return output.to(dtype) if add_to is None else add_to.add_(output.to(dtype))


def tiled_fp8_linear(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel of `fp8_linear`."""
    num_rows, features = len(codes), len(weight)
    output = add_to
    if output is None:
        output = torch.empty((num_rows, features), dtype=dtype, device=codes.device)
    assert output.dtype == dtype
    if num_rows:
        tiling = tiling_of(num_rows, len(code_scales) > 1, shared_memory_bytes(codes.device))
        tiles = -(-num_rows // tiling.rows) * -(-features // tiling.outputs)
        spreads = tiles < (MIN_PROGRAMS if num_rows <= FEW_ROWS else MIN_WIDE_PROGRAMS)
        launch_fp8_linear(
            codes, code_scales, weight, scales, bias, output, tiling,
            spreads=spreads, adds=add_to is not None,
        )  # fmt: skip
    return output


def launch_fp8_linear(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    tiling: Tiling,
    *,
    spreads: bool,
    adds: bool,
) -> None:
    """spreads: whether each chunk of a tile has its own program, if there are several. The chunks'
    sums are then written and read again as float32. adds: whether to add to what `output` holds."""
    from tllm_spec.kernels.batch_invariant_linear_triton import add_chunks_kernel
    from tllm_spec.kernels.fp8_linear_triton import fp8_linear_kernel

    (num_rows, in_features), out_features = codes.shape, weight.shape[0]
    _check(codes, code_scales, weight, scales, output)
    chunk, pdl = chunk_of(out_features, in_features), programmatic_launch(codes.device)
    num_chunks, in_blocks = -(-in_features // chunk), len(code_scales) > 1
    spreads = spreads and num_chunks > 1
    parts = output
    if spreads:
        shape = (num_chunks, num_rows, out_features)
        parts = torch.empty(shape, dtype=torch.float32, device=codes.device)
    tiles = -(-num_rows // tiling.rows) * -(-out_features // tiling.outputs)
    fp8_linear_kernel[(tiles, num_chunks if spreads else 1)](
        *(codes, code_scales, code_scales.stride(0), weight, scales, *scales.stride()),
        *(None if spreads else bias, parts, parts.stride(-2), num_rows, in_features),
        IN=in_features,
        OUT=out_features,
        SPREADS=spreads,
        ADDS=adds and not spreads,
        X_BLOCKS=in_blocks,
        W_BLOCKS=scales.shape[1] > 1,
        WIDEN=codes.device.type == "cpu",  # the interpreter cannot multiply FP8
        ADDED=inputs_added(output.dtype),
        CHUNK=chunk,
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK=BLOCK,
        FETCHED=FETCHED,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl,
    )
    if spreads:
        add_chunks_kernel[(num_rows, -(-out_features // OUTPUTS_ADDED))](
            parts, None if in_blocks else code_scales, bias, output, output.stride(0), num_rows,
            OUT=out_features, CHUNKS=num_chunks, ADDS=adds, BLOCK=OUTPUTS_ADDED, **pdl, ROUNDS=True,
        )  # fmt: skip


def _check(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Asserts what `launch_fp8_linear` needs."""
    (num_rows, in_features), num_blocks = codes.shape, -(-codes.shape[1] // BLOCK)
    assert weight.dtype == codes.dtype == torch.float8_e4m3fn
    assert scales.dtype == code_scales.dtype == torch.float32
    assert weight.shape[1] == in_features and output.shape == (num_rows, len(weight))
    assert code_scales.shape in ((1, num_rows), (num_blocks, num_rows))
    assert scales.shape in ((len(weight), 1), (len(weight), num_blocks))
    assert codes.is_contiguous() and weight.is_contiguous()
    assert output.stride(1) == 1 and (code_scales.stride(1) == 1 or num_rows <= 1)
