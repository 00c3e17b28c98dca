"""Linear layer of a 4-bit weight: `y[t, n] = sum over k of x[t, k] * w[n, k]` with `w[n, k] =
(code[n, k] - zero[n, g]) * scale[n, g]` for the group g of the input k, rounded to x's type. A
batch-invariant Triton kernel if Triton is available, otherwise the plain-torch reference, which is
not batch-invariant.

Codes are stored in blocks of inputs. Byte i of a block has its input i in the low four bits, and
the input i + half in the high ones, where a half is HALF inputs or a shorter group. So a half needs
one scale of each output, and its codes are multiplied as they lie.

The order of sums depends on the weight's shape and group only, as in scaled_linear.py: blocks are
added in order within chunks, and the chunks' sums in order."""

import torch

from tllm_spec.kernels.batch_invariant_linear import OUTPUTS_ADDED, Tiling
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.scaled_linear import MIN_PROGRAMS, OUTPUTS, chunk_of
from tllm_spec.kernels.shared_memory import HOPPER_BYTES, shared_memory_bytes, stages_that_fit

HALF = 64


def half_of(group: int) -> int:
    """Inputs of half a block. group: inputs that share a scale, 0 for all of a row."""
    return min(group, HALF) if group else HALF


def packed(codes: torch.Tensor, group: int) -> torch.Tensor:
    """codes `[N, K]` uint8 below 16 as `[N, ceil(K / 2h) * h]` bytes, h = `half_of(group)`."""
    half = half_of(group)
    padding = -codes.shape[1] % (2 * half)
    halves = torch.nn.functional.pad(codes, (0, padding)).view(len(codes), -1, 2, half)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)


def unpacked(packed_codes: torch.Tensor, in_features: int, group: int) -> torch.Tensor:
    """The inverse of `packed`: `[N, K]` uint8."""
    blocks = packed_codes.view(len(packed_codes), -1, half_of(group))
    return torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)[:, :in_features]


def int4_dequantised(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """`[N, K]` in `dtype`, of codes `[N, K]` with scales and zeros `[N, G]`."""
    size = codes.shape[1]
    zero, scale = (
        each.float().repeat_interleave(group or size, 1)[:, :size] for each in (zeros, scales)
    )
    return (codes.float() - zero).mul_(scale).to(dtype)


def int4_tiling_of(num_rows: int, dtype: torch.dtype, shared_bytes: int = HOPPER_BYTES) -> Tiling:
    """With few rows a program has 20 KiB of the weight in flight. shared_bytes: what a program may
    have (shared_memory.py)."""
    if dtype == torch.float32:  # no tensor cores
        return Tiling(16, OUTPUTS, 4, 2) if num_rows <= 16 else Tiling(64, 64, 8, 2)
    if num_rows <= 32:
        return Tiling(16 if num_rows <= 16 else 32, OUTPUTS, 4, 5)
    rows, outputs = 64 if num_rows <= 64 else 128, 128
    # Codes, rows of 16 bits, and two scales and zero points.
    stage_bytes = HALF * (outputs + 4 * rows) + 16 * outputs
    return Tiling(rows, outputs, 8, stages_that_fit(4, stage_bytes, shared_bytes))


@with_kernel("int4_linear.tiled_int4_linear")
def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums in float32 and rounds once, after the bias and `add_to`.

    Args:
        x: `[T, K]` bfloat16, float16 or float32, any stride between rows.
        weight: `packed` codes, contiguous.
        scales: `[N, G]` float32, contiguous; G = ceil(K / group).
        zeros: `[N, G]` float32, contiguous: whole numbers. A kernel's pipeline needs 4 bytes.
        group: inputs that share a scale: 32, 64, 128, or 0 for all of a row.
        bias: `[N]`.
        add_to: `[T, N]` as x, any stride between rows: the output is added to it, in place.

    Returns:
        `[T, N]` as x: `add_to`, or a new tensor.
    """
    codes = unpacked(weight, x.shape[1], group)
    matrix = int4_dequantised(codes, scales, zeros, group, x.dtype)
    output = x.float().mm(matrix.float().t())
    for added in (bias, add_to):
        if added is not None:
            output += added
    return output.to(x.dtype) if add_to is None else add_to.copy_(output)


def tiled_int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel of `int4_linear`."""
    output = x.new_empty(x.shape[0], weight.shape[0]) if add_to is None else add_to
    if x.shape[0]:
        tiling = int4_tiling_of(x.shape[0], x.dtype, shared_memory_bytes(x.device))
        tiles = -(-x.shape[0] // tiling.rows) * -(-weight.shape[0] // tiling.outputs)
        launch_int4_linear(
            x, weight, scales, zeros, group, bias, output, tiling,
            spreads=tiles < MIN_PROGRAMS, adds=add_to is not None,
        )  # fmt: skip
    return output


def launch_int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
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
    from tllm_spec.kernels.int4_linear_triton import int4_linear_kernel

    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    _check(x, weight, scales, zeros, group, output)
    chunk, pdl = chunk_of(out_features, in_features), programmatic_launch(x.device)
    num_chunks = -(-in_features // chunk)
    spreads = spreads and num_chunks > 1
    parts = output
    if spreads:
        shape = (num_chunks, num_rows, out_features)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    tiles = -(-num_rows // tiling.rows) * -(-out_features // tiling.outputs)
    int4_linear_kernel[(tiles, num_chunks if spreads else 1)](
        x, x.stride(0), weight, scales, zeros, None if spreads else bias,
        parts, parts.stride(-2), num_rows, in_features,
        IN=in_features,
        OUT=out_features,
        GROUP=group or in_features,
        SPREADS=spreads,
        ADDS=adds and not spreads,
        WIDEN=x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        CHUNK=chunk,
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK_HALF=half_of(group),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **pdl,
    )  # fmt: skip
    if spreads:
        add_chunks_kernel[(num_rows, -(-out_features // OUTPUTS_ADDED))](
            parts, None, bias, output, output.stride(0), num_rows,
            OUT=out_features, CHUNKS=num_chunks, ADDS=adds, BLOCK=OUTPUTS_ADDED, **pdl,
        )  # fmt: skip


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group: int,
    output: torch.Tensor,
) -> None:
    """Asserts what `launch_int4_linear` needs."""
    half, inputs = half_of(group), x.shape[1]
    assert group in (0, 32, 64, 128)
    assert weight.dtype == torch.uint8 and scales.dtype == zeros.dtype == torch.float32
    assert weight.is_contiguous() and scales.is_contiguous() and zeros.is_contiguous()
    assert weight.shape[1] == -(-inputs // (2 * half)) * half
    assert scales.shape == zeros.shape == (len(weight), -(-inputs // (group or inputs)))
    assert output.shape == (len(x), len(weight)) and output.dtype == x.dtype
    assert x.stride(1) == 1 == output.stride(1)
