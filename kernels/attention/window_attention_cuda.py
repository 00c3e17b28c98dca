"""The CUDA kernel of window_attention.py: which shapes it supports, the layout of a launch, and the
launch.

CTAs that share the keys of one KV head of one request form a cluster, so their partial results stay
in shared memory and there is no second launch."""

import ctypes
import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.attention.kv_codes import CODES, KVScales
from tllm_spec.kernels.attention.window_splits import MAX_LONG_SPLITS, MIN_KEYS_PER_LONG_SPLIT

HEAD_DIMS = (64, 128)
# Rows of a tensor core tile, and keys that a warp processes at once.
TILE_ROWS = BLOCK_KEYS = 16
MAX_ROW_TILES = 2
# CTAs of a cluster at most. Each split has more than MIN_KEYS_PER_SPLIT keys.
MAX_SPLITS, MIN_KEYS_PER_SPLIT = 8, 64
# Clusters of four and more CTAs do not fit on all multiprocessors: with one CTA per multiprocessor
# they fill this share of the device.
CLUSTERS_SHARE = 3 / 4
# A few CTAs have eight warps and a multiprocessor each. Many CTAs have four warps, and several
# share a multiprocessor: how many depends on the registers, so on the row tiles.
FEW_WARPS, MANY_WARPS = 8, 4
MANY_CTAS = {1: (4, 3, 2), 2: (2,)}
# Limits the bytes in flight.
MAX_RING_BYTES = 20 << 10
# If CTAs fill less than this share of the multiprocessors, requests longer than MAX_SLOW_KEYS are
# faster in the Triton kernel, which splits further.
MIN_SHARE, MAX_SLOW_KEYS = 1 / 3, 4096
# Shared memory of a multiprocessor, and the part that each CTA always takes.
PROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10


@dataclass(frozen=True)
class WindowSizes:
    """Sizes of a launch. max_len: tokens that the block table has room for; has_codes: whether
    keys and values are in FP8."""

    batch: int
    window: int
    group: int
    kv_heads: int
    head_dim: int
    max_len: int
    has_codes: bool = False

    @property
    def tile_bytes(self) -> int:
        """Keys or values of a block."""
        return BLOCK_KEYS * self.head_dim * (1 if self.has_codes else 2)

    @property
    def least_depth(self) -> int:
        """Tiles of a warp's ring at least: the warp's sums are stored there at the end."""
        sums = 4 * TILE_ROWS * self.row_tiles * (self.head_dim + 8)
        return -(-sums // self.tile_bytes)

    @property
    def tiles(self) -> int:
        return self.batch * self.kv_heads

    @property
    def row_tiles(self) -> int:
        return -(-self.window * self.group // TILE_ROWS)


@dataclass(frozen=True)
class Program:
    """Compile-time constants. warps: per CTA; ctas: per multiprocessor; depth: tiles of a warp's
    ring."""

    warps: int
    ctas: int
    depth: int


@dataclass(frozen=True)
class Layout:
    """splits: per tile; min_keys: each split has more keys than this."""

    program: Program
    splits: int
    in_clusters: bool
    min_keys: int


@functools.lru_cache(maxsize=4096)
def layout_of(windows: WindowSizes, processors: int, max_partial_rows: int) -> Layout | None:
    """max_partial_rows: room in the workspace for partial results. None: use the Triton kernel."""
    if windows.row_tiles > MAX_ROW_TILES or windows.window > BLOCK_KEYS:
        return None
    few, *many = programs_of(windows)
    if windows.tiles > processors:
        return _layout_of_many(windows, many, processors, max_partial_rows)
    splits = _cluster_size(windows, processors)
    if windows.max_len > MAX_SLOW_KEYS and windows.tiles * splits < MIN_SHARE * processors:
        return None
    return Layout(few, splits, True, MIN_KEYS_PER_SPLIT)


@functools.lru_cache(maxsize=4096)
def programs_of(windows: WindowSizes) -> tuple[Program, ...]:
    """All programs that windows of these sizes may need, for any batch: first the one for few
    tiles, then those for many."""
    few = Program(FEW_WARPS, 1, _depth(windows, MAX_SPLITS, FEW_WARPS, 1))
    depths = {ctas: _depth(windows, 1, MANY_WARPS, ctas) for ctas in MANY_CTAS[windows.row_tiles]}
    return few, *(
        Program(MANY_WARPS, ctas, depth)
        for ctas, depth in depths.items()
        if depth >= windows.least_depth
    )


def _cluster_size(windows: WindowSizes, processors: int) -> int:
    """The largest power of two with which all clusters run at the same time."""
    size = MAX_SPLITS
    while size > 1:
        room = processors * (CLUSTERS_SHARE if size > 2 else 1)
        if windows.tiles * size <= room and (size - 1) * MIN_KEYS_PER_SPLIT < windows.max_len:
            break
        size //= 2
    return size


def _layout_of_many(
    windows: WindowSizes, programs: Sequence[Program], processors: int, max_partial_rows: int
) -> Layout:
    """Chooses the program that leaves the fewest CTA slots empty. Only very long requests are
    split, as in the Triton kernel."""
    tiles = windows.tiles
    room = max_partial_rows // (tiles * windows.window * windows.group)
    # Splits of codes and of numbers have equal bytes.
    min_keys = MIN_KEYS_PER_LONG_SPLIT * (2 if windows.has_codes else 1)
    splits = max(1, min(MAX_LONG_SPLITS, (windows.max_len - 1) // min_keys, room))
    chosen = min(
        programs, key=lambda program: -(-tiles // (program.ctas * processors)) * program.ctas
    )
    return Layout(chosen, splits, splits == 1, min_keys)


def _depth(windows: WindowSizes, cluster: int, warps: int, ctas: int) -> int:
    left = PROCESSOR_BYTES // ctas - RESERVED_BYTES - shared_bytes(windows, cluster, warps, 0)
    return min(MAX_RING_BYTES, left // warps) // windows.tile_bytes


def shared_bytes(windows: WindowSizes, cluster: int, warps: int, depth: int) -> int:
    """Rings, queries, the window's keys and values, the warps' sums by row, and the sums received
    from other CTAs."""
    rows, head_dim = TILE_ROWS * windows.row_tiles, windows.head_dim
    received = rows * (head_dim + 2 * cluster) if cluster > 1 else 0
    own = 2 * windows.window * windows.tile_bytes // BLOCK_KEYS
    tiles = warps * depth * windows.tile_bytes + 2 * rows * head_dim + own
    return tiles + 4 * (2 * warps * rows + received)


def serves(
    qkv: torch.Tensor, cos_sin: torch.Tensor, norm_weight: torch.Tensor | None, layer: torch.Tensor
) -> bool:
    """Whether the kernel supports the device, the types, and the sizes of heads and pages."""
    return (
        qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and cos_sin.dtype == qkv.dtype
        and layer.dtype in (qkv.dtype, CODES)
        and (norm_weight is None or norm_weight.dtype == qkv.dtype)
        and qkv.shape[-1] in HEAD_DIMS
        and layer.shape[2] >= BLOCK_KEYS
        and nvrtc.why_unavailable(qkv.device.index or 0) is None
    )


@dataclass(frozen=True)
class Operands:
    """Tensors of a launch in the order of the kernel's argument. Without clusters partial results
    go to `partials` and `log_sums`."""

    qkv: torch.Tensor
    cos_sin: torch.Tensor
    norm_weight: torch.Tensor | None
    layer: torch.Tensor
    out: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    offsets: torch.Tensor | None
    kv_slots: torch.Tensor
    num_padding: torch.Tensor | None
    tree_bits: torch.Tensor | None
    sinks: torch.Tensor | None
    partials: torch.Tensor | None
    log_sums: torch.Tensor | None


class _Arguments(ctypes.Structure):
    """The kernel's argument: same layout as `Windows` in window_stream.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in Operands.__annotations__),
        ("value_offset", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in ("table_stride", "max_len", "window", "group", "kv_heads")
        ),
        *((name, ctypes.c_int) for name in ("page_shift", "tiles", "splits", "min_keys", "offset")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
        *((f"{name}_scale", ctypes.c_float) for name in ("inverse_key", "inverse_value", "value")),
    )


def launch(
    operands: Operands,
    windows: WindowSizes,
    layout: Layout,
    scale: float,
    eps: float,
    offset: int,
    scales: KVScales,
) -> None:
    """scale: factor of the scores before the softmax; eps: of the norm; offset: of a tree; scales:
    of codes."""
    device, page_size = operands.qkv.device.index or 0, operands.layer.shape[2]
    addresses = (None if one is None else one.data_ptr() for one in vars(operands).values())
    strides = operands.layer.stride(0), operands.block_tables.stride(0)
    argument = _Arguments(
        *(*addresses, *strides, windows.max_len, windows.window, windows.group, windows.kv_heads),
        *(page_size.bit_length() - 1, windows.tiles, layout.splits, layout.min_keys, offset),
        *(scale * scales.key * math.log2(math.e), eps),
        *(1 / scales.key, 1 / scales.value, scales.value),
    )
    program, cluster = layout.program, layout.splits if layout.in_clusters else 1
    shared = shared_bytes(windows, cluster, program.warps, program.depth)
    shape = nvrtc.Launch(windows.tiles * layout.splits, 32 * program.warps, cluster, shared)
    source = Source(
        *(operands.qkv.dtype, windows.head_dim, windows.row_tiles),
        in_tree=operands.tree_bits is not None,
        has_codes=windows.has_codes,
        has_sinks=operands.sinks is not None,
    )
    kernel = _kernels(device, source, programs_of(windows))[program]
    kernel.launch(shape, torch.cuda.current_stream(device).cuda_stream, argument)


@dataclass(frozen=True)
class Source:
    """Compile-time constants besides those of `Program`."""

    dtype: torch.dtype
    head_dim: int
    row_tiles: int
    in_tree: bool
    has_codes: bool = False
    has_sinks: bool = False

    def macros(self, program: Program) -> tuple[tuple[str, int], ...]:
        return (
            ("BFLOAT16", self.dtype == torch.bfloat16),
            ("HEAD_DIM", self.head_dim),
            ("ROW_TILES", self.row_tiles),
            ("TREE", self.in_tree),
            ("CODES", self.has_codes),
            ("SINKS", self.has_sinks),
            ("WARPS", program.warps),
            ("DEPTH", program.depth),
            ("CTAS", program.ctas),
        )


@functools.cache
def _kernels(
    device: int, source: Source, programs: tuple[Program, ...]
) -> dict[Program, nvrtc.Kernel]:
    """Compiles all programs at once, so that no later round waits for the compiler."""
    major, minor = torch.cuda.get_device_capability(device)

    def compiled(program: Program) -> bytes:
        return nvrtc.compile_source(
            "window_attention.cu", f"sm_{major}{minor}", source.macros(program)
        )

    with ThreadPoolExecutor(len(programs)) as pool:
        cubins = list(pool.map(compiled, programs))
    return {
        program: nvrtc.Kernel(cubin, "window_attention", nvrtc.SHARED_BYTES)
        for program, cubin in zip(programs, cubins, strict=True)
    }
