"""The layout of a launch of window_attention_triton.py: how many programs share a request's keys,
and how many warps each has. The workspace for partial results of the splits, which the CUDA kernel
uses for long requests, too."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.attention.kv_codes import widened
from tllm_spec.kernels.attention.visible_keys import first_key
from tllm_spec.kernels.dispatch import tl, triton
from tllm_spec.kernels.launch import launch_dependents, shared_memory_bytes, wait_for_previous

# Programs of four warps. They keep the memory busy; more of them would only add overhead.
PROGRAMS_PER_MULTIPROCESSOR = 3
# Programs of two warps that run at once on a multiprocessor of an H200.
SMALL_PROGRAMS_PER_MULTIPROCESSOR = 4
# Programs of wide windows stage 3 blocks of keys and values each, so that no more fit. A launch of
# more would have a second wave.
WIDE_PROGRAMS_PER_MULTIPROCESSOR = 2
# Each split has more keys than this, in whole blocks. With fewer the fixed costs of a split (query
# rows, partial result) outweigh reading its keys.
MIN_KEYS_PER_SPLIT, MIN_KEYS_PER_BLOCK = 64, 64
# If one program per tile fills more than half of the device, only very long requests are split.
MIN_KEYS_PER_LONG_SPLIT, MAX_LONG_SPLITS = 2048, 4
MAX_SPLITS = 64
# 32 query rows for each of 8 programs of 128 multiprocessors.
MAX_PARTIAL_ROWS = 1 << 15
MAX_TILE_ROWS = 64
MAX_TILE_KEYS = 128
# A split of a full tile has more keys than this: then its partial result, written and read again,
# has fewer bytes than its keys and values.
MIN_KEYS_PER_WIDE_SPLIT = 2 * MAX_TILE_ROWS
# Windows of more tokens are wide, if they fill a tile.
MAX_NARROW_WINDOW = 8
# Bytes of keys, and as many of values, in flight while a program computes.
TILE_BYTES = 16384
NUM_STAGES = 3
# Heads of more elements have blocks of twice the size, and a stage less: measured on an H200.
MAX_NARROW_D, WIDE_TILE_BYTES, WIDE_STAGES = 256, 32768, 2
# Registers of a thread when three programs of 128 threads share 65,536.
MAX_REGISTERS = 168


@dataclass(frozen=True)
class WindowWorkspace:
    """Partial results of the splits. One workspace serves all launches of a stream, of any shape.
    Captured graphs contain its addresses, so it must live as long as they do."""

    outputs: torch.Tensor
    """[R, D] float32: row (token * heads + head) * num_splits + split; of windows token b * W + w
    is row w of window b."""
    log_sums: torch.Tensor
    """[R] float32: log2 of the summed weights of those rows."""
    num_processors: int = 1
    """Multiprocessors of the device."""
    num_programs: int = 1
    """Programs of the Triton kernel of windows that fill the device."""

    @classmethod
    def allocate(
        cls, width: int, device: torch.device, rows: int = MAX_PARTIAL_ROWS
    ) -> "WindowWorkspace":
        """width: D; rows: R."""
        number = 1
        if device.type == "cuda":
            number = torch.cuda.get_device_properties(device).multi_processor_count
        outputs = torch.empty(rows, width, dtype=torch.float32, device=device)
        log_sums = outputs.new_empty(rows)
        return cls(outputs, log_sums, number, number * PROGRAMS_PER_MULTIPROCESSOR)

    def splits(
        self, num_tiles: int, num_rows: int, max_len: int, *, is_wide: bool = False
    ) -> "Splits":
        """The splits of a launch that has `num_tiles` programs and `num_rows` output rows without
        splits."""
        num_programs, min_keys = self.num_programs, MIN_KEYS_PER_SPLIT
        if is_wide:
            num_programs = num_programs * WIDE_PROGRAMS_PER_MULTIPROCESSOR
            num_programs //= PROGRAMS_PER_MULTIPROCESSOR
            min_keys = MIN_KEYS_PER_WIDE_SPLIT
        wanted = num_programs // num_tiles
        are_rare = wanted <= 1
        if are_rare:
            wanted, min_keys = MAX_LONG_SPLITS, MIN_KEYS_PER_LONG_SPLIT
        most = -(-max_len // (min_keys + MIN_KEYS_PER_BLOCK))
        number = min(wanted, self.outputs.shape[0] // num_rows, most, MAX_SPLITS)
        return Splits(max(1, number), min_keys, are_rare, self._are_small(num_tiles))

    def _are_small(self, num_programs: int) -> bool:
        """Whether waves of two-warp programs leave at most as many slots empty as waves of
        four-warp programs."""
        small = self.num_programs * SMALL_PROGRAMS_PER_MULTIPROCESSOR // PROGRAMS_PER_MULTIPROCESSOR
        return (
            -(-num_programs // small) * small
            <= -(-num_programs // self.num_programs) * self.num_programs
        )


@dataclass(frozen=True)
class Splits:
    """min_keys: each split has more keys. are_rare: most requests are not split. small_programs:
    two warps instead of four."""

    number: int
    min_keys: int
    are_rare: bool
    small_programs: bool


def warps_of(splits: Splits, block_m: int, block_d: int) -> dict[str, int]:
    """Measured on an H200 for 16 rows and heads of 128 in bfloat16: a program of four warps, three
    of which fit a multiprocessor, ends earlier than one of two warps. Four of the latter fit and
    read as fast together."""
    if block_m > 16 or block_d > 128:
        return {"num_warps": 8 if block_m * block_d > 8192 else 4}
    return {"num_warps": 2} if splits.small_programs else {"num_warps": 4, "maxnreg": MAX_REGISTERS}


def is_wide(window: int, block_m: int) -> bool:
    """Whether windows of so many tokens, in tiles of `block_m` rows, have the splits of wide
    ones."""
    return window > MAX_NARROW_WINDOW and block_m == MAX_TILE_ROWS


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


def tile_keys(q: torch.Tensor, layer: torch.Tensor, block_d: int) -> int:
    """Keys of a block. Codes are multiplied in the type of the queries, and those of float32 need
    four times the memory."""
    size = q.element_size() if q.dtype == torch.float32 else layer.element_size()
    if block_d > MAX_NARROW_D:
        return max(16, WIDE_TILE_BYTES // (block_d * max(size, 2)))
    return max(16, min(MAX_TILE_KEYS, TILE_BYTES // (block_d * size)))


def stages_next_to(q: torch.Tensor, block_m: int, block_d: int) -> int:
    """Stages of the pipeline of keys and values: one where a tile of queries leaves no room."""
    used, most = block_m * block_d * q.element_size(), shared_memory_bytes(q.device)
    if block_d > MAX_NARROW_D:
        return WIDE_STAGES if used + 2 * WIDE_STAGES * WIDE_TILE_BYTES <= most else 1
    return NUM_STAGES if used + NUM_STAGES * TILE_BYTES <= most else 1


# What attention kernels share: steps of the online softmax (Milakov and Gimelshein, "Online
# normalizer calculation for softmax", 2018) in powers of two, over keys in pages.


@triton.jit
def add_keys(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, scores: tl.tensor, values: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Adds keys to the state of the online softmax: each row's highest score, the sum of its
    weights relative to that, and the sum of the weighted values. scores `[R, N]`, values
    `[N, D]`."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: no key seen so far
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def add_paged_keys(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, queries: tl.tensor,
    pool: tl.tensor, indices: tl.tensor, own: tl.tensor, seen: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """`add_keys` of a request's keys at `indices` `[N]`, if they are its `own` `[N]` and are `seen`
    `[R, N]`. pool: a layer, where its values begin, the request's block table row, the head, the
    factor of scores, and the numbers of heads, of elements of one, and of tokens of a page."""
    layer, value_offset, table, kv_head, log2_scale, KV_HEADS, HEAD_DIM, PAGE_SIZE = pool
    dims = tl.arange(0, queries.shape[1])
    pages = tl.load(table + indices // PAGE_SIZE, mask=own, other=0)
    # A pool may have more than 2**31 elements.
    slots = pages.to(tl.int64) * PAGE_SIZE + indices % PAGE_SIZE
    pointers = layer + (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
    # Values beyond the length may be NaN, and 0 * NaN is NaN, so they must be loaded as zeros.
    present = own[:, None] & (dims < HEAD_DIM)[None, :]
    keys = widened(tl.load(pointers, mask=present, other=0.0), queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * log2_scale
    scores = tl.where(seen, scores, float("-inf"))
    values = tl.load(pointers + value_offset, mask=present, other=0.0)
    values = widened(values, queries.dtype)
    top, total, mixed = add_keys(top, total, mixed, scores, values)
    return top, total, mixed


# The splits of window attention: the share of the keys that each has, and the kernel that joins
# their results.


LENGTHS = ["max_len", "num_splits", "min_keys", "offset"]
# In a mixed batch these start after the rows of the contexts, at any alignment. Specializing on the
# alignment would compile more kernels.
OFFSETS = ["kv_lens", "num_padding", "offsets"]


@triton.jit
def shares(
    kv_lens: tl.tensor, num_padding: tl.tensor, offsets: tl.tensor, request: tl.tensor,
    offset: tl.tensor, max_len: tl.tensor, num_splits: tl.tensor, min_keys: tl.tensor,
    SPAN: tl.constexpr, HAS_OFFSET: tl.constexpr, PADDED: tl.constexpr, RAGGED: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Number of the request's keys, of the window's rows without padding, and of the keys before
    those and a tree's region; the begin of the block that has the first of the latter that a row
    sees, a split's share of those from there on in whole blocks, and the number of splits that have
    a share. The last split also has the other keys."""
    # Lengths are older than the projection (programmatic_launch.py); L1 may hold stale ones.
    kv_len, num_own = tl.load(kv_lens + request, cache_modifier=".cg"), WINDOW
    if PADDED:
        num_own = WINDOW - tl.load(num_padding + request, cache_modifier=".cg").to(tl.int32)
    if RAGGED:
        end = tl.load(offsets + request + 1, cache_modifier=".cg")
        num_own = end - tl.load(offsets + request, cache_modifier=".cg")
    num_last = num_own + offset if HAS_OFFSET else num_own
    num_old = tl.minimum(tl.maximum(kv_len - num_last, 0), max_len)
    # The first row has position num_old, and no row sees earlier keys than that one.
    first = first_key(num_old, SPAN) // BLOCK_N * BLOCK_N if SPAN else 0
    num_seen = num_old - first
    number = tl.minimum(tl.maximum((num_seen - 1) // min_keys, 1), num_splits)
    share = tl.cdiv(tl.maximum(tl.cdiv(num_seen, number), 1), BLOCK_N) * BLOCK_N
    num_used = tl.maximum(tl.cdiv(num_seen, share), 1)
    return kv_len, num_own, num_old, first, share, num_used


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=OFFSETS)
def reduction_kernel(
    partial_outputs: tl.tensor, log_sums: tl.tensor, kv_lens: tl.tensor, output: tl.tensor,
    max_len: tl.tensor, num_splits: tl.tensor, min_keys: tl.tensor, num_padding: tl.tensor,
    offset: tl.tensor, offsets: tl.tensor, SPAN: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PADDED: tl.constexpr, RAGGED: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    WINDOW: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Joins the splits of `ROWS` output rows (query heads of a token) per program, which are of
    whole windows. Reads only the splits that had keys: the others hold results of an earlier
    launch."""
    launch_dependents(PDL)
    first = tl.program_id(0) * ROWS
    request = first // (WINDOW * HEADS)
    _, num_own, _, _, _, num_used = shares(
        kv_lens, num_padding, offsets, request, offset, max_len, num_splits, min_keys,
        SPAN, HAS_OFFSET, PADDED, RAGGED, WINDOW, BLOCK_N,
    )  # fmt: skip
    wait_for_previous(PDL)
    if num_used == 1:  # the attention kernel wrote the output
        return
    if RAGGED:
        if first // HEADS % WINDOW >= num_own:
            return
        first += (tl.load(offsets + request) - request * WINDOW) * HEADS
    rows, splits, dims = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    used, real_dims = (splits < num_used)[None, :], (dims < HEAD_DIM)[None, :]
    parts = rows[:, None] * num_splits + splits[None, :]
    logs = tl.load(log_sums + parts, mask=used, other=float("-inf"))
    pointers = partial_outputs + parts[:, :, None] * HEAD_DIM + dims[None, None, :]
    outputs = tl.load(pointers, mask=used[:, :, None] & real_dims[:, None, :], other=0.0)
    top = tl.max(logs, 1)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    result = tl.sum(outputs * weights[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    targets = output + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(targets, result.to(output.dtype.element_ty), mask=real_dims)
