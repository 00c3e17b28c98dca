"""Linear layer of an FP8 weight: `y[t, n] = sum over blocks b of scales[n, b] * sum over k in b of
x[t, k] * weight[n, k]`, with a scale for each output and each BLOCK inputs. A batch-invariant
Triton kernel if Triton is available, otherwise the plain-torch reference, which is not
batch-invariant. Where rows need not be batch-invariant either, many of them are multiplied by
torch's GEMM with slices of the weight, each dequantised just before.

The kernel leaves activations in their type, to which E4M3 converts exactly. Its order of sums
depends on the weight's shape only, as in batch_invariant_linear.py: blocks are added in order
within chunks, and the chunks' sums in order. A weight with few outputs has several chunks, so that
a few rows can be spread over the whole device."""

import torch

from tllm_spec.kernels.batch_invariant_linear import OUTPUTS_ADDED, Tiling
from tllm_spec.kernels.dequantise import BLOCK as BLOCK
from tllm_spec.kernels.dequantise import check_scaled as check_scaled
from tllm_spec.kernels.dequantise import dequantised as dequantised
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.scaled_linear_slices import multiply_slices, slice_outputs
from tllm_spec.kernels.shared_memory import HOPPER_BYTES, shared_memory_bytes, stages_that_fit

# Outputs of a tile of few rows, from which the chunks follow.
OUTPUTS = 64
# A GEMM of few rows has so many: nearly two per multiprocessor of an H100 or H200.
MIN_PROGRAMS = 256
MIN_CHUNK = 1024  # fewer blocks would not fill a program's pipeline
# The kernel converts a weight once for each tile, of 128 rows at most. Slices are converted once
# for all rows, but for each byte read 2 are written and read again. On an H100 both take as long
# with 256 rows (`python -m benchmarks.fp8_kernels linear`).
MAX_KERNEL_ROWS = 256


def chunk_of(out_features: int, in_features: int) -> int:
    """Inputs of a chunk, a multiple of BLOCK. It decides the order of sums."""
    wanted = -(-MIN_PROGRAMS // -(-out_features // OUTPUTS))
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


@with_kernel("scaled_linear.tiled_scaled_linear")
def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
    invariant: bool = True,
) -> torch.Tensor:
    """Sums in float32 and rounds once, after the bias and `add_to`.

    With `invariant` a row has the same bits in every batch. Without it `multiply_slices`, which
    rounds more often, multiplies more than MAX_KERNEL_ROWS rows in 16 bits.

    Args:
        x: `[T, K]` bfloat16, float16 or float32, any stride between rows.
        weight: `[N, K]` float8_e4m3fn, contiguous.
        scales: `[N, ceil(K / 128)]` float32, contiguous.
        bias: `[N]`.
        add_to: `[T, N]` as x, any stride between rows: the output is added to it, in place.

    Returns:
        `[T, N]` as x: `add_to`, or a new tensor.
    """
    output = x.float().mm(dequantised(weight, scales, torch.float32).t())
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
    add_to: torch.Tensor | None = None,
    invariant: bool = True,
) -> torch.Tensor:
    """The kernels of `scaled_linear`."""
    output = x.new_empty(x.shape[0], weight.shape[0]) if add_to is None else add_to
    if x.shape[0] > MAX_KERNEL_ROWS and x.dtype != torch.float32 and not invariant:
        adds = add_to is not None
        size = slice_outputs(x.shape[0], *weight.shape, has_sums=adds or bias is not None)
        multiply_slices(x, weight, scales, bias, output, size, adds=adds)
    elif x.shape[0]:
        tiling = tiling_of(x.shape[0], x.dtype, shared_memory_bytes(x.device))
        tiles = -(-x.shape[0] // tiling.rows) * -(-weight.shape[0] // tiling.outputs)
        launch_scaled_linear(
            x, weight, scales, bias, output, tiling,
            spreads=tiles < MIN_PROGRAMS, adds=add_to is not None,
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
    x_scales: torch.Tensor | None = None,
) -> None:
    """spreads: whether each chunk of a tile has its own program, if there are several. The chunks'
    sums are then written and read again as float32. adds: whether to add to what `output` holds.
    x_scales: `[T]` float32, contiguous, of rows in FP8 (fp8_linear.py)."""
    from tllm_spec.kernels.batch_invariant_linear_triton import add_chunks_kernel
    from tllm_spec.kernels.scaled_linear_triton import scaled_linear_kernel

    _check(x, weight, scales, output, x_scales)
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    chunk, pdl = chunk_of(out_features, in_features), programmatic_launch(x.device)
    num_chunks = -(-in_features // chunk)
    spreads = spreads and num_chunks > 1
    parts = output
    if spreads:
        shape = (num_chunks, num_rows, out_features)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles = -(-num_rows // tiling.rows) * -(-out_features // tiling.outputs)
    scaled_linear_kernel[(tiles, num_chunks if spreads else 1)](
        x,
        x.stride(0),
        None if spreads else x_scales,
        weight,
        scales,
        None if spreads else bias,
        parts,
        parts.stride(-2),
        num_rows,
        in_features,
        IN=in_features,
        OUT=out_features,
        SPREADS=spreads,
        ADDS=adds and not spreads,
        WIDEN=x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        CHUNK=chunk,
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK=BLOCK,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl,
    )
    if spreads:
        add_chunks_kernel[(num_rows, -(-out_features // OUTPUTS_ADDED))](
            parts, x_scales, bias, output, output.stride(0), num_rows,
            OUT=out_features, CHUNKS=num_chunks, ADDS=adds, BLOCK=OUTPUTS_ADDED, **pdl,
        )  # fmt: skip


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    output: torch.Tensor,
    x_scales: torch.Tensor | None,
) -> None:
    """Asserts what `launch_scaled_linear` needs."""
    check_scaled(weight, scales)
    assert weight.shape[1] == x.shape[1] and x.stride(1) == 1 == output.stride(1)
    assert output.shape == (len(x), len(weight)) and (
        x_scales is not None or output.dtype == x.dtype
    )
    assert (x_scales is not None) == (x.dtype == weight.dtype)
    assert x_scales is None or x_scales.is_contiguous()
