"""The Triton kernel of quantise_rows.py, which describes inputs and outputs. Importing this file
imports Triton.

Quotients are IEEE divisions, and rounded to E4M3's numbers by an addition in float32, so the
conversion to E4M3 is exact on every device. The norm takes the steps of rms_norm_triton.py."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.quantise_rows import LARGEST, SMALLEST_SCALE
from tllm_spec.kernels.small_m_gemm import NormWeight

_ELEMENTS_PER_WARP = 512  # two 16-byte loads of 2-byte elements per thread


def quantise_rows_triton(
    x: torch.Tensor,
    norm: NormWeight | None = None,
    magnitudes: torch.Tensor | None = None,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `quantise_rows`."""
    num_rows, size = x.shape
    assert x.stride(1) == 1 or size == 1
    assert magnitudes is None or magnitudes.is_contiguous()
    codes = torch.empty((num_rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    if num_rows:
        quantise_rows_kernel[(num_rows,)](
            x,
            x.stride(0),
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            magnitudes,
            float("inf") if bound is None else bound,
            codes,
            scales,
            SIZE=size,
            LARGEST=LARGEST,
            SMALLEST_SCALE=SMALLEST_SCALE,
            BLOCK=block,
            **programmatic_launch(x.device),
            num_warps=max(1, min(block // _ELEMENTS_PER_WARP, 16)),
        )
    return codes, scales


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def on_grid(values: tl.tensor) -> tl.tensor:
    """float32 values up to 448 rounded to the nearest of E4M3's numbers, ties to even: those of a
    binade from 2^e on are 2^(e - 3) apart, below 2^-6 2^-9."""
    exponent = (values.to(tl.int32, bitcast=True) >> 23) & 0xFF
    distance = ((tl.maximum(exponent, 127 - 6) - 3) << 23).to(tl.float32, bitcast=True)
    # Numbers of this magnitude are `distance` apart in float32.
    large = distance * 12582912.0  # 1.5 * 2^23
    rounded = (values + large) - large
    return tl.where(rounded == 0.0, values * 0.0, rounded)  # a zero keeps its sign


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def quantise_rows_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    magnitudes: tl.tensor,
    bound: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One row per program, in registers."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    real = columns < SIZE
    values = tl.load(x + row * x_stride + columns, mask=real, other=0.0).to(tl.float32)
    if norm_weight is not None:
        weights = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
        mean_square = tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0)
        normed = values * tl.rsqrt(mean_square + eps) * weights
        values = normed.to(x.dtype.element_ty).to(tl.float32)
    if magnitudes is None:
        largest = tl.max(tl.abs(values), 0)
    else:
        largest = tl.load(magnitudes + row)
    scale = tl.maximum(tl.div_rn(tl.minimum(largest, bound), LARGEST), SMALLEST_SCALE)
    tl.store(scales + row, scale)
    quotients = tl.div_rn(values, tl.broadcast_to(scale, [BLOCK]))
    # A NaN stays one.
    bounded = tl.clamp(quotients, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(codes + row * SIZE + columns, on_grid(bounded).to(tl.float8e4nv), mask=real)
