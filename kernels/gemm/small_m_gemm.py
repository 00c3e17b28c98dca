"""A linear layer for up to 8 rows with its prologue and epilogue in one kernel: RMSNorm of the
input before the GEMM; bias, SiLU or GELU gate, or residual addition after it.

`small_m_gemm` runs one CUDA kernel, where it is supported (`serves`). Its time is that of reading
the weights once. For more rows torch's GEMM with separate ops is faster.

The kernel computes the norm in another order than the reference: it rounds x times the norm's
weight and divides the finished sums by the root mean square. The reference rounds the whole norm.
Everything else is float32, rounded once."""

import ctypes
import functools
from dataclasses import dataclass
from itertools import accumulate

import torch

from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.gemm.adapter_gemm import AdapterWeights, Shrunk, plain_expand
from tllm_spec.kernels.gemm.int4_weights import check_int4
from tllm_spec.kernels.gemm.norms import Activation, NormWeight, rms_norm, silu_and_mul
from tllm_spec.kernels.gemm.scaled_linear import BLOCK, check_scaled, scaled_linear

# The layout of a launch of small_m_gemm.cu: tiles, splits of the columns, shared memory, grid.


MAX_ROWS = 8
WARPS = 8
# Groups of warps in a CTA. A tile has 16 rows of the weights per group.
ROW_GROUPS = (4, 2, 1)
# CTAs that split the columns of a tile. More would leave multiprocessors idle, because clusters of
# 4 do not fit everywhere.
SPLITS = (2, 1)
# Larger tiles read faster: they are chosen if the busiest multiprocessor then has at most TOLERANCE
# times the least possible work.
TOLERANCE = 1.05
# Bytes of a row in a step of a warp's ring: the first of these that the width allows.
STEP_BYTES = (256, 128)
# Bytes of all rings, by the bits of a weight: on an H200 more in flight is slower.
MAX_RING_BYTES, MIN_DEPTH = {16: 160 << 10, 8: 160 << 10, 4: 120 << 10}, 3
# float32 sums of two tiles (both rows of 8 pairs per warp, 8 rows of x), and sums of squares by CTA
# of a worker and by warp.
SUM_BYTES = 4 * (2 * 2 * 8 * WARPS * MAX_ROWS + (max(SPLITS) + WARPS) * MAX_ROWS)


MAX_PARTS = 4  # of a fused layer with adapters
MIN_GROUP = 32  # columns of one instruction have one scale


@dataclass(frozen=True)
class Tiles:
    """number: of the whole GEMM; row_groups and splits: as in the kernel's argument."""

    number: int
    row_groups: int
    splits: int


@dataclass(frozen=True)
class Stored:
    """How the kernel reads weights: 16 bits, or fewer with 4 bytes for the scale of a group, or 1
    byte with MXFP4."""

    bits: int = 16
    group: int = 0
    """Columns that share a scale; 0: there are none."""
    is_e2m1: bool = False
    """Whether codes of 4 bits are E2M1 numbers, and their scales exponents (MXFP4)."""

    def row_bytes(self, columns: int) -> int:
        scale_bytes = 1 if self.is_e2m1 else 4
        return columns * self.bits // 8 + (
            scale_bytes * (columns // self.group) if self.group else 0
        )


WIDE = Stored()


@dataclass(frozen=True)
class Ring:
    """Per warp: `depth` steps of 16 rows x `step_columns` columns of the weights."""

    depth: int
    step_columns: int
    stored: Stored = WIDE

    @property
    def bytes_of_all(self) -> int:
        step = 16 * self.stored.row_bytes(self.step_columns)
        return WARPS * self.depth * (-(-step // 128) * 128)


@dataclass(frozen=True)
class Plan:
    """A compiled kernel, the shape of its launch, and its tiles."""

    kernel: nvrtc.Kernel
    launch: nvrtc.Launch
    tiles: Tiles


@functools.cache
def plan(
    device: int,
    dtype: torch.dtype,
    rows: int,
    in_features: int,
    features: int,
    gated: bool,
    stored: Stored,
    adapts: bool,
) -> Plan:
    """dtype: of x; features: columns of the output. `splits_that_fit` must not be empty."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = tiles_of(rows, in_features, features, gated, processors, stored)
    ring = ring_of(rows, in_features, tiles.splits, stored)
    assert ring is not None
    grid = min(tiles.number, processors // tiles.splits) * tiles.splits
    shared = shared_bytes(rows, in_features, tiles.splits, ring)
    launch = nvrtc.Launch(grid, 32 * WARPS, tiles.splits, shared)
    return Plan(_kernel(device, definitions(dtype, ring, adapts)), launch, tiles)


def tiles_of(
    rows: int, in_features: int, features: int, gated: bool, processors: int, stored: Stored = WIDE
) -> Tiles:
    """The largest tiles with which the busiest multiprocessor has about the least work."""
    found: list[tuple[float, Tiles]] = []
    for splits in splits_that_fit(rows, in_features, stored):
        for row_groups in ROW_GROUPS:
            number = -(-features // (row_groups * (8 if gated else 16)))
            most = -(-number // min(number, processors // splits)) * row_groups / splits
            found.append((most, Tiles(number, row_groups, splits)))
    least = min(most for most, _ in found)
    return next(tiles for most, tiles in found if most <= TOLERANCE * least)


@functools.cache
def splits_that_fit(rows: int, in_features: int, stored: Stored = WIDE) -> tuple[int, ...]:
    fitting = (splits for splits in SPLITS if ring_of(rows, in_features, splits, stored))
    return tuple(fitting)


def ring_of(rows: int, in_features: int, splits: int, stored: Stored = WIDE) -> Ring | None:
    """The ring with the longest steps, as deep as shared memory allows; None if none fits, or if
    groups are too small."""
    if stored.group and stored.group < MIN_GROUP:
        return None
    left = nvrtc.SHARED_BYTES - shared_bytes(rows, in_features, splits, Ring(0, 0))
    for columns in (8 * size // stored.bits for size in STEP_BYTES):
        depth = min(MAX_RING_BYTES[stored.bits], left) // Ring(1, columns, stored).bytes_of_all
        if in_features % (splits * columns) == 0 and depth >= MIN_DEPTH:
            return Ring(depth, columns, stored)
    return None


def shared_bytes(rows: int, in_features: int, splits: int, ring: Ring) -> int:
    """Shared memory of a CTA: rings, sums, and its share of x."""
    return ring.bytes_of_all + SUM_BYTES + rows * (in_features // splits * 2 + 16)


def definitions(
    dtype: torch.dtype, ring: Ring, adapts: bool = False
) -> tuple[tuple[str, int], ...]:
    """Macros of the source."""
    return (
        ("BFLOAT16", dtype == torch.bfloat16),
        ("BITS", ring.stored.bits),
        ("GROUP", ring.stored.group),
        ("E2M1", ring.stored.is_e2m1),
        ("STEP_COLUMNS", ring.step_columns),
        ("DEPTH", ring.depth),
        ("ADAPTERS", adapts),
    )


@functools.cache
def _kernel(device: int, macros: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = nvrtc.compile_source("small_m_gemm.cu", f"sm_{major}{minor}", macros)
    return nvrtc.Kernel(cubin, "small_m_gemm", nvrtc.SHARED_BYTES)


FP8 = torch.float8_e4m3fn


def small_m_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    group: int = 0,
    bias: torch.Tensor | None = None,
    norm: NormWeight | None = None,
    gated: bool = False,
    activation: Activation = "silu",
    ups: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    adapters: Shrunk | None = None,
) -> torch.Tensor:
    """`norm(x) W^T + bias`; if gated, the activation of its first half times its second half; added
    to `add_to` if given. The kernel must serve these tensors (`serves`).

    Args:
        x: `[T, K]`, any stride between rows.
        weight: `[N, K]`, contiguous, of the type of x, or FP8 with scales, or packed codes of 4
            bits with words (int4_weights.py).
        scales: of FP8 `[N, ceil(K / 128)]` float32, or words `[N, ceil(K / group)]`.
        group: inputs that share a word of codes of 4 bits.
        bias: `[N]`.
        norm: of x, or None.
        gated: the output is `[T, N / 2]`.
        activation: of gates.
        ups: `[T, N]`, any stride between rows: the output is the activation times them. Not gated.
        add_to: the residual stream, of the output's shape, any stride between rows; changed in
            place and returned.
        out: without `add_to`, what is written and returned, any stride between rows.
        adapters: added to the outputs before the gate (`takes`).
    """
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    output = out if add_to is None else add_to
    if output is None:
        output = x.new_empty(x.shape[0], features)
    assert output.shape == (x.shape[0], features)
    assert ups is None or (ups.shape == output.shape and ups.stride(1) == 1 and not gated)
    if norm is not None and x.dtype == torch.float16:
        # In float16 x times the norm's weight, without the division, could overflow.
        x, norm = rms_norm(x, norm.weight, norm.eps), None
    own = norm, gated, activation, ups, add_to
    _launch(x, weight, scales, group, bias, *own, output, adapters)
    return output


def stored_as(weight: torch.Tensor, scales: torch.Tensor | None, group: int) -> Stored:
    if scales is None:
        return WIDE
    if weight.dtype == FP8:
        return Stored(8, BLOCK)
    return Stored(4, group, scales.dtype == torch.uint8)


def serves(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None = None, group: int = 0
) -> bool:
    """Whether the kernel supports the device, type and sizes."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and bool(splits_that_fit(x.shape[0], x.shape[1], stored_as(weight, scales, group)))
        and nvrtc.why_unavailable(x.device.index or 0) is None
    )


def takes(weights: AdapterWeights) -> bool:
    """Whether the kernel can add such adapters."""
    return len(weights.sizes) <= MAX_PARTS and weights.fit_one_by_one


class _Arguments(ctypes.Structure):
    """The kernel's argument: same layout as `Gemm` in small_m_gemm.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "bias", "norm_weight", "residual", "ups", "weight", "scales", "out")
        ),
        *(
            (name, ctypes.c_int)
            for name in ("out_features", "in_features", "x_stride", "out_stride")
        ),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_tiles", "row_groups", "splits")),
        *((name, ctypes.c_int) for name in ("gated", "is_gelu", "up_stride", "has_wide_norm")),
        ("eps", ctypes.c_float),
    )


class _Expansion(ctypes.Structure):
    """`Expansion` in small_m_gemm.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("b", "sums", "slots", "ranks")),
        ("slot_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("num_parts", "step")),
        *((name, ctypes.c_int) for name in ("end_0", "end_1", "end_2")),
    )


class _AdaptedArguments(ctypes.Structure):
    """`Gemm` in small_m_gemm.cu with ADAPTERS."""

    _fields_ = (("gemm", _Arguments), ("adapters", _Expansion))


def _expansion(adapters: Shrunk) -> _Expansion:
    weights = adapters.weights
    ends = [*accumulate(weights.sizes)] + [sum(weights.sizes)] * MAX_PARTS
    tensors = weights.b, adapters.sums, adapters.slots, weights.ranks
    addresses = (tensor.data_ptr() for tensor in tensors)
    numbers = weights.b.stride(0), len(weights.sizes), weights.step
    return _Expansion(*addresses, *numbers, *ends[: MAX_PARTS - 1])


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor | None,
    group: int,
    bias: torch.Tensor | None,
    norm: NormWeight | None,
    gated: bool,
    activation: Activation,
    ups: torch.Tensor | None,
    add_to: torch.Tensor | None,
    output: torch.Tensor,
    adapters: Shrunk | None,
) -> None:
    assert x.stride(1) == output.stride(1) == 1 and weight.is_contiguous()
    stored = stored_as(weight, scales, group)
    assert (scales is not None) == (stored.bits < 16)
    if scales is not None and stored.bits == 8:
        check_scaled(weight, scales)
    elif scales is not None:
        check_int4(weight, scales, group, x.shape[1])
    (rows, features), device = output.shape, x.device.index or 0
    prepared = plan(
        device, x.dtype, rows, x.shape[1], features, gated, stored, adapters is not None
    )
    norm_weight = None if norm is None else norm.weight
    operands = (x, bias, norm_weight, add_to, ups, weight, scales, output)
    addresses = (None if tensor is None else tensor.data_ptr() for tensor in operands)
    tiles = prepared.tiles
    arguments: ctypes.Structure = _Arguments(
        *addresses,
        *(weight.shape[0], x.shape[1], x.stride(0), output.stride(0)),
        *(rows, tiles.number, tiles.row_groups, tiles.splits),
        *(gated, activation != "silu", 0 if ups is None else ups.stride(0)),
        norm_weight is not None and norm_weight.dtype == torch.float32,
        0.0 if norm is None else norm.eps,
    )
    if adapters is not None:
        arguments = _AdaptedArguments(arguments, _expansion(adapters))
    prepared.kernel.launch(
        prepared.launch, torch.cuda.current_stream(device).cuda_stream, arguments
    )


def plain_small_m_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    group: int = 0,
    bias: torch.Tensor | None = None,
    norm: NormWeight | None = None,
    gated: bool = False,
    activation: Activation = "silu",
    ups: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
    adapters: Shrunk | None = None,
) -> torch.Tensor:
    """Reference of `small_m_gemm`."""
    if norm is not None:
        x = rms_norm.reference(x, norm.weight, norm.eps)
    if scales is None:
        output = torch.nn.functional.linear(x, weight, bias)
    else:
        output = scaled_linear.reference(x, weight, scales, bias, group=group)
    if adapters is not None:
        output = plain_expand(adapters, output, x.dtype)
    if gated or ups is not None:
        output = silu_and_mul.reference(output, activation, ups)
    return output if add_to is None else add_to.add_(output)
