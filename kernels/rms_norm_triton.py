"""The Triton kernel of rms_norm.py, which describes inputs and outputs. Importing this file imports
Triton.

It takes the same steps as F.rms_norm (float32 squares, one division by H, rsqrt, two
multiplications, one rounding), but sums the squares in another order. So float32 results may differ
by a few units in the last place, and 16-bit results by one."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

_ELEMENTS_PER_WARP = 512  # two 16-byte loads of 2-byte elements per thread


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """See `rms_norm`."""
    num_rows, size = x.shape
    assert weight.is_contiguous() and (x.stride(1) == 1 or size == 1)
    output = x.new_empty(num_rows, size) if add_to is None else add_to
    assert output.shape == x.shape and (output.stride(1) == 1 or size == 1)
    block = triton.next_power_of_2(size)
    rms_norm_kernel[(num_rows,)](
        x,
        x.stride(0),
        weight,
        output,
        output.stride(0),
        eps,
        ADDS=add_to is not None,
        SIZE=size,
        BLOCK=block,
        **programmatic_launch(x.device),
        num_warps=max(1, min(block // _ELEMENTS_PER_WARP, 16)),
    )
    return output


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def rms_norm_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    output_stride: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row per program, in registers."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    weights = tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    values = tl.load(x + row * x_stride + columns, mask=real, other=0.0).to(tl.float32)
    mean_square = tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0)
    normed = (values * tl.rsqrt(mean_square + eps) * weights).to(output.dtype.element_ty)
    targets = output + row * output_stride + columns
    if ADDS:
        old = tl.load(targets, mask=real, other=0.0).to(tl.float32)
        normed = (old + normed.to(tl.float32)).to(output.dtype.element_ty)
    tl.store(targets, normed, mask=real)
