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

from tllm_spec.kernels.dispatch import with_kernel

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


@with_kernel("batch_invariant_linear.tiled_linear")
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
