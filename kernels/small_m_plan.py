"""The layout of a launch of small_m_gemm.cu: tiles, splits of the columns, shared memory, grid."""

import functools
from dataclasses import dataclass

import torch

from tllm_spec.kernels import nvrtc

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
# Bytes of all rings: on an H200 more in flight is slower.
MAX_RING_BYTES, MIN_DEPTH = 160 << 10, 3
# float32 sums of two tiles (both rows of 8 pairs per warp, 8 rows of x), and sums of squares by CTA
# of a worker and by warp.
SUM_BYTES = 4 * (2 * 2 * 8 * WARPS * MAX_ROWS + (max(SPLITS) + WARPS) * MAX_ROWS)


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
        return WARPS * self.depth * 16 * self.stored.row_bytes(self.step_columns)


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
) -> Plan:
    """dtype: of x; features: columns of the output. `splits_that_fit` must not be empty."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = tiles_of(rows, in_features, features, gated, processors, stored)
    ring = ring_of(rows, in_features, tiles.splits, stored)
    assert ring is not None
    grid = min(tiles.number, processors // tiles.splits) * tiles.splits
    shared = shared_bytes(rows, in_features, tiles.splits, ring)
    launch = nvrtc.Launch(grid, 32 * WARPS, tiles.splits, shared)
    return Plan(_kernel(device, definitions(dtype, ring)), launch, tiles)


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
        depth = min(MAX_RING_BYTES, left) // Ring(1, columns, stored).bytes_of_all
        if in_features % (splits * columns) == 0 and depth >= MIN_DEPTH:
            return Ring(depth, columns, stored)
    return None


def shared_bytes(rows: int, in_features: int, splits: int, ring: Ring) -> int:
    """Shared memory of a CTA: rings, sums, and its share of x."""
    return ring.bytes_of_all + SUM_BYTES + rows * (in_features // splits * 2 + 16)


def definitions(dtype: torch.dtype, ring: Ring) -> tuple[tuple[str, int], ...]:
    """Macros of the source."""
    return (
        ("BFLOAT16", dtype == torch.bfloat16),
        ("BITS", ring.stored.bits),
        ("GROUP", ring.stored.group),
        ("E2M1", ring.stored.is_e2m1),
        ("STEP_COLUMNS", ring.step_columns),
        ("DEPTH", ring.depth),
    )


@functools.cache
def _kernel(device: int, macros: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = nvrtc.compile_source("small_m_gemm.cu", f"sm_{major}{minor}", macros)
    return nvrtc.Kernel(cubin, "small_m_gemm", nvrtc.SHARED_BYTES)
