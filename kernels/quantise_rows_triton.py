"""The Triton kernel of quantise_rows.py, which describes inputs and outputs. Importing this file
imports Triton.

Quotients are IEEE divisions, and rounded to E4M3's numbers by an addition in float32, so the
conversion to E4M3 is exact on every device. The norm takes the steps of rms_norm_triton.py, SwiGLU
those of silu_and_mul_triton.py."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.dequantise import BLOCK
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.quantise_rows import LARGEST, ROWS_TOGETHER, SMALLEST_SCALE
from tllm_spec.kernels.rms_norm import NormWeight

_ELEMENTS_PER_WARP = 512  # two 16-byte loads of 2-byte elements per thread
_PART = 1024  # columns per program, where a program need not have the whole row
# More rows keep the device busy with a program each, which reads a row once.
_MAX_SPLIT_ROWS = 256


def quantise_rows_triton(
    x: torch.Tensor,
    norm: NormWeight | None = None,
    *,
    gated: bool = False,
    in_blocks: bool = False,
    scale: torch.Tensor | None = None,
    magnitudes: torch.Tensor | None = None,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `quantise_rows`."""
    num_rows, size = len(x), x.shape[1] // 2 if gated else x.shape[1]
    assert x.stride(1) == 1 or size == 1
    is_split = norm is None and (in_blocks or scale is not None or magnitudes is not None)
    if gated and not is_split and num_rows <= _MAX_SPLIT_ROWS:
        x, magnitudes = _activated(x, size)
        gated, is_split = False, True
    assert magnitudes is None or magnitudes.is_contiguous()
    assert scale is None or scale.is_contiguous()
    num_magnitudes = 1 if magnitudes is None else magnitudes.shape[1]
    groups = triton.cdiv(size, BLOCK) if in_blocks else 1
    in_memory = num_rows + -num_rows % ROWS_TOGETHER if in_blocks else num_rows
    codes = torch.empty((in_memory, size), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((groups, in_memory), dtype=torch.float32, device=x.device)
    block = _PART if is_split else max(triton.next_power_of_2(size), BLOCK)
    if num_rows:
        quantise_rows_kernel[(num_rows, triton.cdiv(size, block))](
            x,
            x.stride(0),
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
            scale,
            magnitudes,
            float("inf") if bound is None else bound,
            codes,
            scales,
            in_memory,
            SIZE=size,
            GATED=gated,
            SCALE_OF_ROW=scale is not None and scale.ndim > 0,
            GROUP=BLOCK if in_blocks else block,
            MAGNITUDES=num_magnitudes,
            POWER=triton.next_power_of_2(num_magnitudes),
            LARGEST=LARGEST,
            SMALLEST_SCALE=SMALLEST_SCALE,
            BLOCK=block,
            **programmatic_launch(x.device),
            num_warps=max(1, min(block // _ELEMENTS_PER_WARP, 16)),
        )
    return codes[:num_rows], scales[:, :num_rows]


def _activated(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """SwiGLU of x `[T, 2 * size]`, and the largest magnitudes of its parts, `[T, parts]`."""
    activated, parts = x.new_empty(len(x), size), triton.cdiv(size, _PART)
    magnitudes = torch.empty((len(x), parts), dtype=torch.float32, device=x.device)
    if len(x):
        activate_kernel[(len(x), parts)](
            x,
            x.stride(0),
            activated,
            magnitudes,
            SIZE=size,
            BLOCK=_PART,
            **programmatic_launch(x.device),
            num_warps=4,
        )
    return activated, magnitudes


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
def _swiglu(gates: tl.tensor, real: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """float32, rounded to the type of `gates`, after which what they multiply follows."""
    gate = tl.load(gates, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=real, other=0.0).to(tl.float32)
    activated = gate / (1.0 + tl.exp(-gate)) * up  # as silu_and_mul_triton.py
    return activated.to(gates.dtype.element_ty).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def activate_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    activated: tl.tensor,
    magnitudes: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, parts of them)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    values = _swiglu(x + row * x_stride + columns, real, SIZE)
    tl.store(activated + row * SIZE + columns, values.to(activated.dtype.element_ty), mask=real)
    largest = tl.max(tl.abs(values), 0)
    tl.store(magnitudes + row * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit(do_not_specialize=["scales_stride"])  # type: ignore[untyped-decorator]  # triton has no types
def quantise_rows_kernel(
    x: tl.tensor,
    x_stride: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    static_scale: tl.tensor,
    magnitudes: tl.tensor,
    bound: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    scales_stride: tl.tensor,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    SCALE_OF_ROW: tl.constexpr,
    GROUP: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    POWER: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, parts of them). GROUP inputs of a part share a scale. A norm, and scales that are
    made here of whole rows, have one part. POWER: of two, at least MAGNITUDES."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    if GATED:
        values = _swiglu(x + row * x_stride + columns, real, SIZE)
    else:
        values = tl.load(x + row * x_stride + columns, mask=real, other=0.0).to(tl.float32)
    if norm_weight is not None:
        weights = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
        mean_square = tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0)
        normed = values * tl.rsqrt(mean_square + eps) * weights
        values = normed.to(x.dtype.element_ty).to(tl.float32)
    groups = tl.reshape(values, [BLOCK // GROUP, GROUP])
    if static_scale is not None:
        own_scale = tl.load(static_scale + row * SCALE_OF_ROW)
        scale = tl.full([BLOCK // GROUP], 0.0, tl.float32) + own_scale
    else:
        largest = tl.max(tl.abs(groups), 1)
        if magnitudes is not None:
            part = tl.arange(0, POWER)
            own = tl.load(magnitudes + row * MAGNITUDES + part, mask=part < MAGNITUDES, other=0.0)
            largest = tl.max(own, 0)
            largest += tl.zeros([BLOCK // GROUP], tl.float32)
        scale = tl.maximum(tl.div_rn(tl.minimum(largest, bound), LARGEST), SMALLEST_SCALE)
    if BLOCK // GROUP == 1:  # of the whole row
        if tl.program_id(1) == 0:
            tl.store(scales + row + tl.arange(0, 1), scale)
    else:
        group = tl.program_id(1) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(scales + group * scales_stride + row, scale, mask=group * GROUP < SIZE)
    quotients = tl.div_rn(groups, tl.broadcast_to(scale[:, None], groups.shape))
    # A NaN stays one.
    bounded = tl.clamp(quotients, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    rounded = tl.reshape(on_grid(bounded), [BLOCK]).to(tl.float8e4nv)
    tl.store(codes + row * SIZE + columns, rounded, mask=real)
