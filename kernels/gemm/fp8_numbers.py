"""Numbers in FP8 (E4M3): activations become codes and scales, and weights become numbers of another
type."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.gemm.norms import NormWeight, rms_norm, silu_and_mul
from tllm_spec.kernels.launch import (
    begin,
    fetch,
    launch_dependents,
    programmatic_launch,
    wait_for_previous,
)

# Activations in FP8: an optional RMSNorm, or SwiGLU, rounded to the rows' type as if it were a
# layer of its own, then codes and scales. A Triton kernel if Triton is available, otherwise the
# plain-torch reference; of the same rounded rows both make the same bits, and a row's bits do not
# depend on other rows.


LARGEST = 448.0  # of E4M3
SMALLEST_SCALE = 2.0**-96  # of zeros, too: neither 0 nor subnormal
# Up to so many rows, a tile of fp8_linear.py, GEMMs add chunks and activate themselves.
FUSED_ROWS = 16
ROWS_TOGETHER = 4  # whose scales of a block cuBLASLt reads in 16 bytes


@with_kernel("quantise_rows_triton")
def quantise_rows(
    x: torch.Tensor,
    norm: NormWeight | None = None,
    *,
    gated: bool = False,
    in_blocks: bool = False,
    scale: torch.Tensor | None = None,
    magnitudes: torch.Tensor | None = None,
    bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[T, K]` float8_e4m3fn and scales `[G, T]` float32, so that `codes * scale` is about x
    after norm or SwiGLU. A dynamic scale is the largest magnitude divided by 448: of a row (G is 1)
    or of BLOCK inputs of a row (G is `ceil(K / BLOCK)`). Codes are rounded to nearest, ties to
    even, and saturate.

    Args:
        x: `[T, K]`, or `[T, 2 * K]` if gated; bfloat16, float16 or float32, any stride between
            rows.
        norm: of x, or None.
        gated: SwiGLU comes first: x has gates, then what they multiply. Without a norm.
        in_blocks: whether BLOCK inputs share a scale.
        scale: float32, static: `[]` of all rows, or `[T]` of each. Without `in_blocks`.
        magnitudes: `[T, M]` float32, contiguous: the largest of each row's parts, if x is one of
            them.
        bound: of a row's scale: magnitudes above it count as the bound.

    The kernel allocates codes and scales of blocks for a multiple of 4 rows (fp8_gemms.py).
    """
    if norm is not None:
        x = rms_norm.reference(x, norm.weight, norm.eps)
    values = (silu_and_mul.reference(x) if gated else x).float()
    number, size = values.shape
    width = BLOCK if in_blocks else size
    groups = torch.nn.functional.pad(values, (0, -size % width)).view(number, -1, width)
    if scale is None:
        largest = groups.abs().amax(2) if magnitudes is None else magnitudes.amax(1, keepdim=True)
        if bound is not None:
            largest = largest.clamp_max(bound)
        # On CUDA torch multiplies by the reciprocal of a number; a tensor is divided by.
        scales = (largest / largest.new_full((), LARGEST)).clamp_min(SMALLEST_SCALE)
    else:
        scales = scale.expand(number).unsqueeze(1)
    codes = (groups / scales.unsqueeze(2)).clamp_(-LARGEST, LARGEST).view(number, -1)[:, :size]
    return codes.to(torch.float8_e4m3fn).contiguous(), scales.t().contiguous()


# Quotients are IEEE divisions, and rounded to E4M3's numbers by an addition in float32, so the
# conversion to E4M3 is exact on every device. The norm takes the steps of rms_norm_triton.py,
# SwiGLU those of silu_and_mul_triton.py.


_ELEMENTS_PER_WARP = 512  # two 16-byte loads of 2-byte elements per thread
_LINE = tl.constexpr(64)  # 2-byte elements of a cache line, 128 bytes
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
            IS_FEW=num_rows <= FUSED_ROWS,
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


@triton.jit
def on_grid(values: tl.tensor) -> tl.tensor:
    """float32 values up to 448 rounded to the nearest of E4M3's numbers, ties to even: those of a
    binade from 2^e on are 2^(e - 3) apart, below 2^-6 2^-9."""
    exponent = (values.to(tl.int32, bitcast=True) >> 23) & 0xFF
    distance = ((tl.maximum(exponent, 127 - 6) - 3) << 23).to(tl.float32, bitcast=True)
    # Numbers of this magnitude are `distance` apart in float32.
    large = distance * 12582912.0  # 1.5 * 2^23
    rounded = (values + large) - large
    return tl.where(rounded == 0.0, values * 0.0, rounded)  # a zero keeps its sign


@triton.jit
def swiglu(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """`silu(gate) * up` of float32 values, as silu_and_mul_triton.py."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _swiglu(gates: tl.tensor, real: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """float32, rounded to the type of `gates`, after which what they multiply follows."""
    gate = tl.load(gates, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=real, other=0.0).to(tl.float32)
    return swiglu(gate, up).to(gates.dtype.element_ty).to(tl.float32)


@triton.jit
def activate_kernel(
    x: tl.tensor, x_stride: tl.tensor, activated: tl.tensor, magnitudes: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, parts of them)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    values = _swiglu(x + row * x_stride + columns, real, SIZE)
    tl.store(activated + row * SIZE + columns, values.to(activated.dtype.element_ty), mask=real)
    largest = tl.max(tl.abs(values), 0)
    tl.store(magnitudes + row * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit
def _fetch_weights(norm_weight: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Fetch the norm's weight into the L2 cache while the previous kernel runs."""
    lines = tl.arange(0, BLOCK // _LINE) * _LINE
    fetch(norm_weight + tl.minimum(lines, SIZE - 1))


@triton.jit(do_not_specialize=["scales_stride"])
def quantise_rows_kernel(
    x: tl.tensor, x_stride: tl.tensor, norm_weight: tl.tensor, eps: tl.tensor,
    static_scale: tl.tensor, magnitudes: tl.tensor, bound: tl.tensor, codes: tl.tensor,
    scales: tl.tensor, scales_stride: tl.tensor, SIZE: tl.constexpr, GATED: tl.constexpr,
    SCALE_OF_ROW: tl.constexpr, GROUP: tl.constexpr, MAGNITUDES: tl.constexpr, POWER: tl.constexpr,
    LARGEST: tl.constexpr, SMALLEST_SCALE: tl.constexpr, IS_FEW: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, parts of them). GROUP inputs of a part share a scale. A norm, and scales that are
    made here of whole rows, have one part. POWER: of two, at least MAGNITUDES. IS_FEW: whether
    rows are at most FUSED_ROWS."""
    if not IS_FEW:
        launch_dependents(PDL)
    elif PDL and norm_weight is not None:
        _fetch_weights(norm_weight, SIZE, BLOCK)
    wait_for_previous(PDL)
    if IS_FEW:  # the next GEMM would fetch weights that the previous one's push out of the cache
        launch_dependents(PDL)
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


# FP8 weights, with a float32 scale for each row and each BLOCK inputs, as numbers of another type:
# `out[n, k] = scales[n, k // BLOCK] * weight[n, k]`. A Triton kernel if Triton is available,
# otherwise the plain-torch reference; both have the same bits.
#
# The product is a float32, which is rounded to the type of `out`. In float16, results past 65504
# are infinite, and those below 2^-14 lose bits.


BLOCK = 128  # inputs that share a scale
# A program has 128 threads, and each of them two loads of 16 bytes under way.
BLOCKS_OF_PROGRAM, NUM_WARPS = 32, 4


def check_scaled(weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Asserts the layout of a weight `[..., N, K]` and its scales."""
    assert weight.dtype == torch.float8_e4m3fn and weight.is_contiguous()
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    assert scales.shape == (*weight.shape[:-1], -(-weight.shape[-1] // BLOCK))


def dequantised(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight `[..., N, K]` in FP8 times scales `[..., N, ceil(K / 128)]`, in `dtype`."""
    by_input = scales.repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]
    return weight.float().mul_(by_input).to(dtype)


@with_kernel("dequantise_rows_triton")
def dequantise_rows(weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Fills `out`.

    Args:
        weight: `[N, K]` float8_e4m3fn, contiguous.
        scales: `[N, ceil(K / 128)]` float32, contiguous.
        out: `[N, K]` bfloat16, float16 or float32, contiguous.
    """
    out.copy_(dequantised(weight, scales, out.dtype))


def dequantise_rows_triton(weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """See `dequantise_rows`."""
    check_scaled(weight, scales)
    assert out.shape == weight.shape and out.is_contiguous()
    num_blocks = scales.numel()
    dequantise_kernel[(-(-num_blocks // BLOCKS_OF_PROGRAM),)](
        weight,
        scales,
        out,
        num_blocks,
        IN=weight.shape[1],
        BLOCK=BLOCK,
        BLOCKS=BLOCKS_OF_PROGRAM,
        num_warps=NUM_WARPS,
        **programmatic_launch(out.device),
    )


@triton.jit(do_not_specialize=["num_blocks"])
def dequantise_kernel(
    weight: tl.tensor, scales: tl.tensor, out: tl.tensor, num_blocks: tl.tensor, IN: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """A program has BLOCKS of the `num_blocks` blocks of inputs with a scale; all blocks of a row
    follow each other."""
    begin(PDL)
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    per_row = tl.cdiv(IN, BLOCK)
    inputs = (blocks % per_row * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    places = (blocks // per_row).to(tl.int64)[:, None] * IN + inputs
    real = (blocks < num_blocks)[:, None] & (inputs < IN)
    scale = tl.load(scales + blocks, mask=blocks < num_blocks, other=0.0)
    # Each weight is read once: what was written should stay in the L2 cache instead.
    w = tl.load(weight + places, mask=real, other=0.0, eviction_policy="evict_first")
    values = w.to(tl.float32) * scale[:, None]
    tl.store(out + places, values.to(out.dtype.element_ty), mask=real)
