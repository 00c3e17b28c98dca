"""`y = x W^T + b` whose row y[t] has the same bits whatever other rows stand in x, and how many.

A library's matrix product takes the algorithm that is fastest for the number of rows, and each adds
in its own order. Here the order is a function of the weight's shape alone: the inputs are cut into
chunks of CHUNK, each chunk is summed from its first input to its last, and the chunks' sums are
added from the first to the last. How the work is spread over
programs may differ: one program that adds all its chunks, or one for each chunk and a second launch
that adds what they left, do the same additions.

The plain reference is torch.mm, which promises none of this.
"""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.triton_support import has_kernels

# Long enough for a program to fill its pipeline, short enough that a few rows find work for the
# whole device.
CHUNK = 2048
# What a program multiplies and adds to its accumulator at a time: no variant may group inputs
# differently.
BLOCK_IN = 64
# With fewer tiles than this (two for each multiprocessor of an H200) chunks are spread.
MIN_PROGRAMS = 264
OUTPUTS_ADDED = 1024  # by a program of the second launch


@dataclass(frozen=True)
class Tiling:
    """How much of the output a program makes. It has no influence on the result's bits; on tensor
    cores that is measured (tests/kernels/test_batch_invariant_linear.py), not promised by
    anyone."""

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


def batch_invariant_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums in float32, rounded once, after the bias. float32 is multiplied as float32.

    x: `[T, K]`, any stride between rows; weight: `[N, K]`, contiguous; bias: `[N]`. Returns `[T,
    N]`."""
    if not has_kernels(x.device):
        return plain_linear(x, weight, bias)
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
    """spreads: whether each chunk of a tile is a program of its own, and its sum 4 bytes for each
    element of the output, which are written and read again."""
    from tllm_spec.kernels.batch_invariant_linear_triton import add_chunks_kernel, linear_kernel

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
        WIDEN=x.device.type
        == "cpu",  # Triton's interpreter multiplies the bits of bfloat16 numbers
        CHUNK=CHUNK,
        BLOCK_ROWS=tiling.rows,
        BLOCK_OUT=tiling.outputs,
        BLOCK_IN=BLOCK_IN,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if spreads:
        add_chunks_kernel[(num_rows, -(-out_features // OUTPUTS_ADDED))](
            parts, bias, output, num_rows, OUT=out_features, CHUNKS=num_chunks, BLOCK=OUTPUTS_ADDED
        )
    return output


def plain_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The reference of `batch_invariant_linear`, but for the order of its sums."""
    return x.mm(weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
