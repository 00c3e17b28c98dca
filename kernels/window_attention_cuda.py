"""The CUDA kernel behind window_attention.py, which says what goes in and comes out: which shapes
it serves, how a launch is laid out, and the launch.

CTAs that share the keys of one KV head of one request are a cluster, so that their partial results
never leave the multiprocessors and there is no second launch. It does not know where windows come
from."""

import ctypes
import functools
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.window_splits import MAX_LONG_SPLITS, MIN_KEYS_PER_LONG_SPLIT

HEAD_DIMS = (64, 128)
# Rows of a tile of the tensor cores, and the keys that a warp takes at once.
TILE_ROWS = BLOCK_KEYS = 16
MAX_ROW_TILES = 2
# Of a cluster. A split has more keys than this.
MAX_SPLITS, MIN_KEYS_PER_SPLIT = 8, 64
# Clusters of four and more leave multiprocessors without a place: one CTA each, they fill so much
# of the device.
CLUSTERS_SHARE = 3 / 4
# Few CTAs have eight warps and a multiprocessor to themselves. Of many with four warps so many
# share one, the fewer rows the more: registers decide.
FEW_WARPS, MANY_WARPS = 8, 4
MANY_CTAS = {1: (4, 3, 2), 2: (2,)}
# Tiles of a warp's ring, at least: its sums lie there in the end. At most: what is on its way.
MIN_DEPTH = {1: 3, 2: 5}
MAX_RING_BYTES = 20 << 10
# With CTAs for less than this share of the multiprocessors a request that is longer than so many
# keys is read faster by Triton's kernel, which splits further.
MIN_SHARE, MAX_SLOW_KEYS = 1 / 3, 4096
# Shared memory of a multiprocessor, and what each CTA takes of it unasked.
PROCESSOR_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10


@dataclass(frozen=True)
class Windows:
    """A launch's sizes. max_len: tokens that the block table has room for."""

    batch: int
    window: int
    group: int
    kv_heads: int
    head_dim: int
    max_len: int

    @property
    def tiles(self) -> int:
        return self.batch * self.kv_heads

    @property
    def row_tiles(self) -> int:
        return -(-self.window * self.group // TILE_ROWS)


@dataclass(frozen=True)
class Program:
    """What is compiled. warps: of a CTA; ctas: of a multiprocessor; depth: tiles of a warp's
    ring."""

    warps: int
    ctas: int
    depth: int


@dataclass(frozen=True)
class Layout:
    """splits: of a tile; min_keys: a split has more."""

    program: Program
    splits: int
    in_clusters: bool
    min_keys: int


@functools.lru_cache(maxsize=4096)
def layout_of(windows: Windows, processors: int, max_partial_rows: int) -> Layout | None:
    """max_partial_rows: for which there is room in memory. None: Triton's kernel is for it."""
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
def programs_of(windows: Windows) -> tuple[Program, ...]:
    """That for few tiles first, and those for many: all that windows of this kind may need,
    whatever their number."""
    few = Program(FEW_WARPS, 1, _depth(windows, MAX_SPLITS, FEW_WARPS, 1))
    depths = {ctas: _depth(windows, 1, MANY_WARPS, ctas) for ctas in MANY_CTAS[windows.row_tiles]}
    least = MIN_DEPTH[windows.row_tiles]
    return few, *(
        Program(MANY_WARPS, ctas, depth) for ctas, depth in depths.items() if depth >= least
    )


def _cluster_size(windows: Windows, processors: int) -> int:
    """The largest power of two with which all clusters run at once."""
    size = MAX_SPLITS
    while size > 1:
        room = processors * (CLUSTERS_SHARE if size > 2 else 1)
        if windows.tiles * size <= room and (size - 1) * MIN_KEYS_PER_SPLIT < windows.max_len:
            break
        size //= 2
    return size


def _layout_of_many(
    windows: Windows, programs: Sequence[Program], processors: int, max_partial_rows: int
) -> Layout:
    """The CTAs leave as few places empty as possible, and only what is very long is split, as
    Triton's kernel does."""
    tiles = windows.tiles
    room = max_partial_rows // (tiles * windows.window * windows.group)
    splits = max(1, min(MAX_LONG_SPLITS, (windows.max_len - 1) // MIN_KEYS_PER_LONG_SPLIT, room))
    chosen = min(
        programs, key=lambda program: -(-tiles // (program.ctas * processors)) * program.ctas
    )
    return Layout(chosen, splits, splits == 1, MIN_KEYS_PER_LONG_SPLIT)


def _depth(windows: Windows, cluster: int, warps: int, ctas: int) -> int:
    left = PROCESSOR_BYTES // ctas - RESERVED_BYTES - shared_bytes(windows, cluster, warps, 0)
    return min(MAX_RING_BYTES, left // warps) // (2 * BLOCK_KEYS * windows.head_dim)


def shared_bytes(windows: Windows, cluster: int, warps: int, depth: int) -> int:
    """Rings, queries, the window's keys and values; sums of warps by row, and those that a CTA
    receives."""
    rows, head_dim = TILE_ROWS * windows.row_tiles, windows.head_dim
    received = rows * (head_dim + 2 * cluster) if cluster > 1 else 0
    halves = warps * depth * BLOCK_KEYS * head_dim + (rows + 2 * windows.window) * head_dim
    return 2 * halves + 4 * (2 * warps * rows + received)


def serves(
    qkv: torch.Tensor, turns: torch.Tensor, norm_weight: torch.Tensor | None, layer: torch.Tensor
) -> bool:
    """Whether device, types and sizes of heads and pages allow it."""
    return (
        qkv.is_cuda
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and turns.dtype == qkv.dtype
        and (norm_weight is None or norm_weight.dtype == qkv.dtype)
        and qkv.shape[3] in HEAD_DIMS
        and layer.shape[2] >= BLOCK_KEYS
        and nvrtc.why_unavailable(qkv.device.index or 0) is None
    )


@dataclass(frozen=True)
class Operands:
    """The tensors of a launch, in the kernel's order; None: there is none. Partial results are for
    splits that are no clusters."""

    qkv: torch.Tensor
    turns: torch.Tensor
    norm_weight: torch.Tensor | None
    layer: torch.Tensor
    out: torch.Tensor
    block_tables: torch.Tensor
    kv_lens: torch.Tensor
    kv_slots: torch.Tensor
    num_padding: torch.Tensor | None
    partials: torch.Tensor | None
    log_sums: torch.Tensor | None


class _Windows(ctypes.Structure):
    """The kernel's argument, as it has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in Operands.__annotations__),
        ("value_offset", ctypes.c_longlong),
        *(
            (name, ctypes.c_int)
            for name in ("table_stride", "max_len", "window", "group", "kv_heads")
        ),
        *((name, ctypes.c_int) for name in ("page_shift", "tiles", "splits", "min_keys")),
        *((name, ctypes.c_float) for name in ("scale", "eps")),
    )


def launch(operands: Operands, windows: Windows, layout: Layout, scale: float, eps: float) -> None:
    """Scores are multiplied by `scale` before the softmax; eps: the norm's."""
    device, page_size = operands.qkv.device.index or 0, operands.layer.shape[2]
    addresses = (None if one is None else one.data_ptr() for one in vars(operands).values())
    strides = operands.layer.stride(0), operands.block_tables.stride(0)
    argument = _Windows(
        *(*addresses, *strides, windows.max_len, windows.window, windows.group, windows.kv_heads),
        *(page_size.bit_length() - 1, windows.tiles, layout.splits, layout.min_keys),
        *(scale * math.log2(math.e), eps),
    )
    program, cluster = layout.program, layout.splits if layout.in_clusters else 1
    shared = shared_bytes(windows, cluster, program.warps, program.depth)
    shape = nvrtc.Launch(windows.tiles * layout.splits, 32 * program.warps, cluster, shared)
    source = Source(operands.qkv.dtype, windows.head_dim, windows.row_tiles)
    kernel = _kernels(device, source, programs_of(windows))[program]
    kernel.launch(shape, torch.cuda.current_stream(device).cuda_stream, argument)


@dataclass(frozen=True)
class Source:
    """What kernels differ in besides their programs."""

    dtype: torch.dtype
    head_dim: int
    row_tiles: int

    def macros(self, program: Program) -> tuple[tuple[str, int], ...]:
        return (
            ("BFLOAT16", self.dtype == torch.bfloat16),
            ("HEAD_DIM", self.head_dim),
            ("ROW_TILES", self.row_tiles),
            ("WARPS", program.warps),
            ("DEPTH", program.depth),
            ("CTAS", program.ctas),
        )


@functools.cache
def _kernels(
    device: int, source: Source, programs: tuple[Program, ...]
) -> dict[Program, nvrtc.Kernel]:
    """All at once: a round of other requests waits for no compiler later."""
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
