"""Linear layer of FP8 activations and an FP8 weight: `y[t, n] = sum over blocks b of
code_scales[b, t] * scales[n, b] * sum over k in b of codes[t, k] * weight[n, k]`. A scale belongs
to a block of BLOCK inputs, or to all inputs of a row; then it multiplies the finished sums. A
Triton kernel on FP8 tensor cores if Triton is available, otherwise the plain-torch reference. Both
are batch-invariant.

Products of codes are multiples of 2^-18 up to 2^18, so float64 holds the sum of a block exactly,
whatever the order. FP8 tensor cores sum with fewer bits than float32; each block of 128 inputs, or
with other types than bfloat16 each 32, is added to a float32 sum. The order of these sums depends
on the weight's shape only, as in scaled_linear.py.

Where a tile's chunks of inputs have programs of their own, a second launch adds their sums in
order; or with counters, for a few rows, the last program of a tile to finish does."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.gemm.batch_invariant_linear import (
    OUTPUTS_ADDED,
    Tiling,
    load_weights,
    tile_of_program,
)
from tllm_spec.kernels.gemm.fp8_numbers import BLOCK, swiglu
from tllm_spec.kernels.gemm.int4_weights import load_inputs
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.kernels.gemm.scaled_linear import chunk_of
from tllm_spec.kernels.launch import (
    HOPPER_BYTES,
    fetch,
    launch_dependents,
    programmatic_launch,
    shared_memory_bytes,
    stages_that_fit,
    wait_for_previous,
)

# Up to so many rows a program's tile has all of them.
FEW_ROWS = 64
TENSOR_CORE_INPUTS = 32  # of an instruction
FETCHED = 4  # blocks of weights that a program fetches while the previous kernel runs
# GEMMs of few and of more rows have two programs per multiprocessor of an H100 or H200, or one.
MIN_PROGRAMS, MIN_WIDE_PROGRAMS = 256, 128
NUM_COUNTERS = 256  # of tiles whose chunks have programs, which are fewer


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


@with_kernel("tiled_fp8_linear")
def fp8_linear(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
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
        out: without `add_to`, `[T, N]` of `dtype`, any stride between rows, for the output.
        counters: `[NUM_COUNTERS]` int32, zeros before and after, of launches that follow each other
            on one stream; None: a second launch adds chunks that have programs.

    Returns:
        `[T, N]`: `add_to`, `out` or a new tensor.
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
    if add_to is not None:
        return add_to.add_(output.to(dtype))
    return output.to(dtype) if out is None else out.copy_(output)


def tiled_fp8_linear(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel of `fp8_linear`."""
    output = out if add_to is None else add_to
    if output is None:
        output = torch.empty((len(codes), len(weight)), dtype=dtype, device=codes.device)
    assert output.dtype == dtype
    _launch(codes, code_scales, weight, scales, bias, output, counters, adds=add_to is not None)
    return output


@with_kernel("tiled_fp8_swiglu")
def fp8_swiglu(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    counters: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of `fp8_linear`'s rounded result, whose first half are gates, `[T, N / 2]`; and the
    largest magnitudes of its parts, `[T, parts]` float32. counters: as of `fp8_linear`."""
    output = fp8_linear.reference(codes, code_scales, weight, scales, dtype, bias)
    activated = silu_and_mul.reference(output)
    return activated, activated.abs().amax(1, keepdim=True).float()


def tiled_fp8_swiglu(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    counters: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of `fp8_swiglu`."""
    num_rows, device = len(codes), codes.device
    output = torch.empty((num_rows, len(weight) // 2), dtype=dtype, device=device)
    outputs = tiling_of(num_rows, len(code_scales) > 1).outputs
    parts = -(-len(weight) // outputs)
    magnitudes = torch.empty((num_rows, parts), dtype=torch.float32, device=device)
    operands = codes, code_scales, weight, scales, bias, output, counters
    _launch(*operands, adds=False, magnitudes=magnitudes)
    return output, magnitudes


def _launch(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    counters: torch.Tensor | None,
    *,
    adds: bool,
    magnitudes: torch.Tensor | None = None,
) -> None:
    """`launch_fp8_linear` with the tiling for the number of rows, if there are any."""
    num_rows = len(codes)
    if not num_rows:
        return
    tiling = tiling_of(num_rows, len(code_scales) > 1, shared_memory_bytes(codes.device))
    tiles = -(-num_rows // tiling.rows) * -(-len(weight) // tiling.outputs)
    spreads = tiles < (MIN_PROGRAMS if num_rows <= FEW_ROWS else MIN_WIDE_PROGRAMS)
    launch_fp8_linear(
        codes, code_scales, weight, scales, bias, output, tiling,
        spreads=spreads, adds=adds, magnitudes=magnitudes, counters=counters,
    )  # fmt: skip


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
    magnitudes: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
) -> None:
    """spreads: whether each chunk of a tile has its own program, if there are several. The chunks'
    sums are then written and read again as float32. adds: whether to add to what `output` holds.
    magnitudes: of SwiGLU's parts, one for each tile of outputs; None: without SwiGLU. SwiGLU of
    chunks that have programs needs `counters`."""
    from tllm_spec.kernels.gemm.batch_invariant_linear import add_chunks_kernel

    (num_rows, in_features), out_features = codes.shape, weight.shape[0]
    _check(codes, code_scales, weight, scales)
    assert output.shape == (num_rows, out_features // (1 if magnitudes is None else 2))
    chunk, pdl = chunk_of(out_features, in_features), programmatic_launch(codes.device)
    num_chunks, in_blocks = -(-in_features // chunk), len(code_scales) > 1
    spreads = spreads and num_chunks > 1
    out_tiles = -(-out_features // tiling.outputs)
    tiles, parts = -(-num_rows // tiling.rows) * out_tiles, None
    if spreads:
        shape = (num_chunks, num_rows, out_features)
        parts = torch.empty(shape, dtype=torch.float32, device=codes.device)
        assert tiles <= NUM_COUNTERS if counters is not None else magnitudes is None
    fp8_linear_kernel[(tiles, num_chunks if spreads else 1)](
        *(codes, code_scales, code_scales.stride(0), weight, scales, *scales.stride()),
        *(bias, output, output.stride(0), magnitudes, parts, counters if spreads else None),
        *(num_rows, in_features),
        IN=in_features,
        OUT=out_features,
        ADDS=adds,
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
    if spreads and counters is None:
        add_chunks_kernel[(num_rows, -(-out_features // OUTPUTS_ADDED))](
            parts, None if in_blocks else code_scales, bias, output, output.stride(0), num_rows,
            OUT=out_features, CHUNKS=num_chunks, ADDS=adds, BLOCK=OUTPUTS_ADDED, **pdl, ROUNDS=True,
        )  # fmt: skip


def _check(
    codes: torch.Tensor, code_scales: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor
) -> None:
    """Asserts what `launch_fp8_linear` needs."""
    (num_rows, in_features), num_blocks = codes.shape, -(-codes.shape[1] // BLOCK)
    assert weight.dtype == codes.dtype == torch.float8_e4m3fn
    assert scales.dtype == code_scales.dtype == torch.float32
    assert weight.shape[1] == in_features
    assert code_scales.shape in ((1, num_rows), (num_blocks, num_rows))
    assert scales.shape in ((len(weight), 1), (len(weight), num_blocks))
    assert codes.is_contiguous() and weight.is_contiguous()
    assert code_scales.stride(1) == 1 or num_rows <= 1


# A tile is `[outputs, rows]`, W x^T, as in scaled_linear.py; both operands go from shared
# memory to FP8 tensor cores. The number of inputs is also an argument that is not a compile-time
# constant, so that the loop is pipelined for any size.


@triton.jit
def _tile_of_program(
    num_rows: tl.tensor, OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Rows and outputs of the program's tile, also past the edges; and the weight's rows, which
    wrap around, so that loads of weights need no mask. Half of a gated tile are gates, and the
    other half what they multiply."""
    rows, outs = tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT)
    weight_rows = outs % OUT
    if IS_GATED:
        HALF: tl.constexpr = BLOCK_OUT // 2
        pair = outs // BLOCK_OUT * HALF + outs % HALF
        weight_rows = pair % (OUT // 2) + outs // HALF % 2 * (OUT // 2)
    return rows, outs, weight_rows


@triton.jit
def _fetch_weights(
    weight: tl.tensor, num_rows: tl.tensor, IN: tl.constexpr, OUT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr,
    FETCHED: tl.constexpr, IS_GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Fetch the first blocks of the program's weights into the L2 cache. They do not depend on the
    previous kernel, so they are read while it runs."""
    _, _, weight_rows = _tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT, IS_GATED)
    inputs = tl.program_id(1) * CHUNK + tl.arange(0, FETCHED) * BLOCK
    rows = weight + weight_rows.to(tl.int64)[:, None] * IN
    fetch(rows + tl.minimum(inputs, IN - 1)[None, :])


@triton.jit
def scaled(total: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """The product, which the compiler does not contract with an addition."""
    return tl.fma(total, tl.broadcast_to(scale, total.shape), 0.0)


@triton.jit
def _scale(pointers: tl.tensor, real: tl.tensor, IS_SCALED: tl.constexpr) -> tl.tensor:
    """A block's scales, or 1."""
    if IS_SCALED:
        return tl.load(pointers, mask=real)
    return tl.full(pointers.shape, 1.0, tl.float32)


@triton.jit
def sum_codes(
    x_rows: tl.tensor, x_scale_rows: tl.tensor, x_scale_stride: tl.tensor, real_row: tl.tensor,
    w_rows: tl.tensor, w_scale_rows: tl.tensor, w_scale_stride: tl.tensor, first: tl.tensor,
    num_inputs: tl.tensor, IN: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr,
    WIDEN: tl.constexpr, ADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`[BLOCK_OUT, BLOCK_ROWS]` float32: sum over inputs `first` to `first + CHUNK`, in order.
    ADDED: inputs that tensor cores add (fp8_linear.py)."""
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    row_scale = _scale(w_scale_rows, None, not W_BLOCKS)
    # Scales are read a block ahead, so that no product waits for them.
    block, last = first // BLOCK, tl.cdiv(num_inputs, BLOCK) - 1
    w_scale = _scale(w_scale_rows + block * w_scale_stride, None, W_BLOCKS)
    x_scale = _scale(x_scale_rows + block * x_scale_stride, real_row, X_BLOCKS)
    for start in tl.range(first, tl.minimum(first + CHUNK, num_inputs), BLOCK):
        block = tl.minimum(start // BLOCK + 1, last)
        next_w = _scale(w_scale_rows + block * w_scale_stride, None, W_BLOCKS)
        next_x = _scale(x_scale_rows + block * x_scale_stride, real_row, X_BLOCKS)
        inputs = start + tl.arange(0, BLOCK)
        w = load_weights(w_rows, inputs, IN, BLOCK)
        x = load_inputs(x_rows, real_row, inputs, IN, BLOCK, WIDEN)
        if WIDEN:
            w = w.to(tl.float32)
        if not X_BLOCKS and not W_BLOCKS:
            total = tl.dot(w, x, total, input_precision="ieee", max_num_imprecise_acc=ADDED)
        else:
            product = tl.dot(w, x, input_precision="ieee", max_num_imprecise_acc=ADDED)
            # An explicit FMA has the same bits wherever the compiler might contract and where not.
            total = tl.fma(product, w_scale[:, None] * x_scale[None, :], total)
        w_scale, x_scale = next_w, next_x
    if not W_BLOCKS:
        total = scaled(total, row_scale[:, None])
    return total


@triton.jit
def _added(
    places: tl.tensor, step: tl.tensor, real: tl.tensor, BLOCK_OUT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, CHUNKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """All chunks' sums, in order. They are in the L2 cache, where other programs have put them."""
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        total += tl.load(places + chunk * step, mask=real, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _put(
    total: tl.tensor, x_scale: tl.tensor, bias: tl.tensor, output: tl.tensor,
    output_stride: tl.tensor, magnitudes: tl.tensor, rows: tl.tensor, real_row: tl.tensor,
    outs: tl.tensor, weight_rows: tl.tensor, OUT: tl.constexpr, ADDS: tl.constexpr,
    X_BLOCKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUT: tl.constexpr,
) -> None:  # fmt: skip
    """Scale the sums of all inputs, add the bias, round, and write them or SwiGLU of them."""
    if not X_BLOCKS:
        total = scaled(total, x_scale[None, :])
    if bias is not None:
        total += tl.load(bias + weight_rows).to(tl.float32)[:, None]
    total = total.to(output.dtype.element_ty).to(tl.float32)
    output_rows = output + rows.to(tl.int64)[None, :] * output_stride
    if magnitudes is None:
        real = real_row[None, :] & (outs < OUT)[:, None]
        if ADDS:
            total += tl.load(output_rows + outs[:, None], mask=real, other=0.0).to(tl.float32)
        tl.store(output_rows + outs[:, None], total.to(output.dtype.element_ty), mask=real)
    else:
        pairs = tl.permute(tl.reshape(total, [2, BLOCK_OUT // 2, BLOCK_ROWS]), (1, 2, 0))
        gate, up = tl.split(pairs)
        activated = swiglu(gate, up).to(output.dtype.element_ty)
        tile = tl.min(outs, 0) // BLOCK_OUT
        pair = tile * (BLOCK_OUT // 2) + tl.arange(0, BLOCK_OUT // 2)
        real = real_row[None, :] & (pair < OUT // 2)[:, None]
        tl.store(output_rows + pair[:, None], activated, mask=real)
        largest = tl.max(tl.where(real, tl.abs(activated.to(tl.float32)), 0.0), 0)
        parts = magnitudes + rows * tl.cdiv(OUT, BLOCK_OUT) + tile
        tl.store(parts, largest, mask=real_row)


@triton.jit(do_not_specialize=["num_rows", "num_inputs", "x_scales_stride"])
def fp8_linear_kernel(
    x: tl.tensor, x_scales: tl.tensor, x_scales_stride: tl.tensor, weight: tl.tensor,
    scales: tl.tensor, scales_stride: tl.tensor, scales_block_stride: tl.tensor, bias: tl.tensor,
    output: tl.tensor, output_stride: tl.tensor, magnitudes: tl.tensor, parts: tl.tensor,
    counters: tl.tensor, num_rows: tl.tensor, num_inputs: tl.tensor, IN: tl.constexpr,
    OUT: tl.constexpr, ADDS: tl.constexpr, X_BLOCKS: tl.constexpr, W_BLOCKS: tl.constexpr,
    WIDEN: tl.constexpr, ADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK: tl.constexpr, FETCHED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (tiles, chunks or 1). parts: `[chunks, T, N]` float32 for the sums of chunks that have
    programs; None: a program adds all. With ADDS the rounded result is added to what the output
    holds. X_BLOCKS, W_BLOCKS: whether a scale belongs to BLOCK inputs of a row, not to the row."""
    IS_GATED: tl.constexpr = magnitudes is not None
    if PDL:
        _fetch_weights(
            weight, num_rows, IN, OUT, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK, FETCHED, IS_GATED
        )
    wait_for_previous(PDL)
    launch_dependents(PDL)
    rows, outs, weight_rows = _tile_of_program(num_rows, OUT, BLOCK_ROWS, BLOCK_OUT, IS_GATED)
    # Rows past the end are not read: few rows would read as much of x as of the weight.
    real_row, long_rows = rows < num_rows, weight_rows.to(tl.int64)
    x_rows, x_scale_rows = x + rows.to(tl.int64)[None, :] * IN, x_scales + rows
    w_rows, w_scale_rows = weight + long_rows[:, None] * IN, scales + long_rows * scales_stride
    if ADDS and PDL and counters is not None:  # what is added to was written long ago
        own_rows = output + tl.minimum(rows, num_rows - 1).to(tl.int64) * output_stride
        fetch(own_rows + tl.min(outs, 0))
    x_scale = _scale(x_scale_rows, real_row, not X_BLOCKS)
    begin = tl.program_id(1) * CHUNK
    total = tl.zeros([BLOCK_OUT, BLOCK_ROWS], tl.float32)
    for first in tl.range(begin, num_inputs if parts is None else begin + CHUNK, CHUNK):
        total += sum_codes(
            x_rows, x_scale_rows, x_scales_stride, real_row, w_rows, w_scale_rows,
            scales_block_stride, first, num_inputs,
            IN, X_BLOCKS, W_BLOCKS, WIDEN, ADDED, CHUNK, BLOCK_ROWS, BLOCK_OUT, BLOCK,
        )  # fmt: skip
    if parts is None:
        _put(
            total, x_scale, bias, output, output_stride, magnitudes, rows, real_row, outs,
            weight_rows, OUT, ADDS, X_BLOCKS, BLOCK_ROWS, BLOCK_OUT,
        )  # fmt: skip
    else:
        places = parts + rows.to(tl.int64)[None, :] * OUT + weight_rows[:, None]
        step, real = num_rows.to(tl.int64) * OUT, real_row[None, :]
        tl.store(places + tl.program_id(1) * step, total, mask=real)
        if counters is not None:
            tl.debug_barrier()  # all of the program's sums are written before it is counted
            if tl.atomic_add(counters + tl.program_id(0), 1) == tl.num_programs(1) - 1:
                tl.store(counters + tl.program_id(0), 0)
                total = _added(places, step, real, BLOCK_OUT, BLOCK_ROWS, (IN + CHUNK - 1) // CHUNK)
                _put(
                    total, x_scale, bias, output, output_stride, magnitudes, rows, real_row, outs,
                    weight_rows, OUT, ADDS, X_BLOCKS, BLOCK_ROWS, BLOCK_OUT,
                )  # fmt: skip
