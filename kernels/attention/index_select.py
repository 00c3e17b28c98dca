"""The choice of an indexer (DeepSeek V3.2, arXiv 2512.02556, section 2.1): scores of the keys that
each row sees, and the `topk` best of them, by higher score, then by lower position.

A row's scores and choice have the same bits whatever else is in the launch. Lengths and block
tables are read on the device, and the launches depend on shapes only, so CUDA graphs hold them.

`select_keys` is two Triton kernels if Triton is available, otherwise the plain-torch reference,
which is the definition."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.attention.visible_keys import MAX_TREE_KEYS
from tllm_spec.kernels.attention.window_splits import power_of_two
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

# Scores that are kept at a time: those of all keys of some rows.
SCORE_BYTES = 64 << 20


@dataclass(frozen=True)
class SeenKeys:
    """The keys that each of S rows sees. All tensors are on the device."""

    requests: torch.Tensor
    """`[S]` int32: rows of the block tables."""
    ends: torch.Tensor
    """`[S]` int32: a row sees the keys at the positions before this one, perhaps none."""
    bits: torch.Tensor | None
    """`[S]` int64: of a tree, whether it also sees key ends + j, for each bit j. None: no tree."""
    block_tables: torch.Tensor
    """`[B, P]` int32: pages of the requests."""
    max_len: int
    """Host upper bound of the keys of a request."""

    def part(self, start: int, size: int) -> "SeenKeys":
        """The same for `size` rows from `start` on."""
        own = slice(start, start + size)
        bits = None if self.bits is None else self.bits[own]
        tables = self.block_tables, self.max_len
        return SeenKeys(self.requests[own], self.ends[own], bits, *tables)


def rows_at_once(max_len: int) -> int:
    """Rows whose scores of `max_len` keys are kept at a time."""
    return max(1, SCORE_BYTES // (max_len * torch.float32.itemsize))


@with_kernel("launch_select_keys")
def select_keys(
    queries: torch.Tensor,
    weights: torch.Tensor,
    layer: torch.Tensor,
    seen: SeenKeys,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """The score of a key is the sum over heads of weight * relu(query . key).

    Args:
        queries: `[S, H, D]`, contiguous, rotated.
        weights: `[S, H]` float32, any stride between rows: with the scores' factors.
        layer: `[pages, page_size, D]`, contiguous, page_size a power of two.
        seen: keys of each row.
        slots: `[S, topk]` int32, out: the pool's slots of the chosen keys, in order of their
            positions; after them anything.
        counts: `[S]` int32, out: how many keys are chosen.
    """
    topk, size, page_size = slots.shape[1], layer.shape[2], layer.shape[1]
    slots.zero_()
    for start in range(0, len(slots), rows := rows_at_once(seen.max_len * size)):
        own, part = slice(start, start + rows), seen.part(start, rows)
        positions = torch.arange(seen.max_len, device=layer.device)
        tables = part.block_tables[part.requests]
        pool_slots = tables[:, positions // page_size] * page_size + positions % page_size
        visible = positions < part.ends[:, None]
        if part.bits is not None:
            place = positions - part.ends[:, None]
            bits = (part.bits[:, None] >> place.clamp(0, MAX_TREE_KEYS - 1)) & 1 != 0
            visible |= bits & (place >= 0) & (place < MAX_TREE_KEYS)
        keys = layer.view(-1, size)[pool_slots].float().masked_fill(~visible[..., None], 0)
        scores = (queries[own].float() @ keys.mT).relu()
        scores = (scores * weights[own, :, None]).sum(1).masked_fill(~visible, -torch.inf)
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        chosen = torch.zeros_like(visible).scatter_(1, best, True) & visible
        order = chosen.sort(dim=1, descending=True, stable=True).indices[:, :topk]
        slots[own, : order.shape[1]] = pool_slots.gather(1, order)
        counts[own] = chosen.sum(1, dtype=torch.int32)


BLOCK_KEYS = 128
ROWS_OF_PROGRAM = 8  # rows that a program scores one after the other, where there are many
# Scores that a program of the choice has at a time; it keeps the first ones in registers, of which
# counting takes fewer than writing.
SMALL_BLOCK, WRITTEN_BLOCK, MAX_BLOCK = 1 << 11, 1 << 13, 1 << 15


def launch_select_keys(
    queries: torch.Tensor,
    weights: torch.Tensor,
    layer: torch.Tensor,
    seen: SeenKeys,
    slots: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """The kernels of `select_keys`."""
    (number, heads, size), (_, page_size, _) = queries.shape, layer.shape
    assert queries.is_contiguous() and layer.is_contiguous() and weights.stride(1) == 1
    assert weights.dtype == torch.float32 and slots.is_contiguous() and counts.is_contiguous()
    max_len = min(seen.max_len, seen.block_tables.shape[1] * page_size)
    step = min(number, rows_at_once(max_len))
    scores = torch.empty(step, max_len, dtype=torch.float32, device=queries.device)
    for start in range(0, number, step):
        own, part = slice(start, start + step), seen.part(start, step)
        tables = part.block_tables, part.block_tables.stride(0), part.requests, part.ends, part.bits
        rows = len(part.requests)
        many = ROWS_OF_PROGRAM if rows >= 8 * ROWS_OF_PROGRAM else 1
        score_kernel[(-(-max_len // BLOCK_KEYS), -(-rows // many))](
            *(queries[own], weights[own], weights.stride(0), layer, *tables, scores, max_len, rows),
            TREE=part.bits is not None,
            HEADS=heads,
            SIZE=size,
            PAGE_SIZE=page_size,
            ROWS=many,
            BLOCK_N=BLOCK_KEYS,
            BLOCK_H=max(16, power_of_two(heads)),
            BLOCK_D=max(16, power_of_two(size)),
            WIDEN=queries.device.type == "cpu",  # the interpreter cannot multiply bfloat16
            num_warps=4,
            **programmatic_launch(queries.device),
        )
        # Only two sizes: a block of this size takes seconds to compile.
        block = SMALL_BLOCK if max_len <= SMALL_BLOCK else MAX_BLOCK
        choice_kernel[(rows,)](
            *(scores, *tables, slots[own], counts[own], max_len),
            TREE=part.bits is not None,
            TOPK=slots.shape[1],
            PAGE_SIZE=page_size,
            BLOCK=block,
            WRITTEN=min(block, WRITTEN_BLOCK),
            SMALL=SMALL_BLOCK,
            num_warps=32 if block > SMALL_BLOCK else 8,
            **programmatic_launch(queries.device),
        )


_LENGTHS = ["max_len", "num_rows", "table_stride", "weight_stride"]
_OFFSETS = ["block_tables", "requests", "ends", "bits", "weights", "slots", "counts"]


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_OFFSETS[:-2])
def score_kernel(
    queries: tl.tensor, weights: tl.tensor, weight_stride: tl.tensor, layer: tl.tensor,
    block_tables: tl.tensor, table_stride: tl.tensor, requests: tl.tensor, ends: tl.tensor,
    bits: tl.tensor, scores: tl.tensor, max_len: tl.tensor, num_rows: tl.tensor,
    TREE: tl.constexpr, HEADS: tl.constexpr, SIZE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (blocks of keys, blocks of rows). A row's keys beyond those that it sees are left out of
    `scores` `[S, max_len]`, or have -inf."""
    begin(PDL)
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    heads, dims = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    dot_type: tl.constexpr = tl.float32 if WIDEN else queries.dtype.element_ty
    for index in range(ROWS):
        row = (tl.program_id(1) * ROWS + index).to(tl.int64)
        end = tl.load(ends + row, mask=row < num_rows, other=0)
        last = tl.minimum(end + 64 if TREE else end, max_len)
        if (row < num_rows) & (tl.program_id(0) * BLOCK_N < last):
            own = keys < last
            table = block_tables + tl.load(requests + row) * table_stride
            pages = tl.load(table + keys // PAGE_SIZE, mask=own, other=0).to(tl.int64)
            entries = layer + (pages * PAGE_SIZE + keys % PAGE_SIZE)[:, None] * SIZE
            seen = keys < end
            if TREE:
                seen |= _is_set(tl.load(bits + row), keys - end)
            real = (own & seen)[:, None] & (dims < SIZE)[None, :]
            found = tl.load(entries + dims[None, :], mask=real, other=0.0)
            of_heads = (heads < HEADS)[:, None] & (dims < SIZE)[None, :]
            q = queries + (row * HEADS + heads)[:, None] * SIZE + dims[None, :]
            q = tl.load(q, mask=of_heads, other=0.0)
            own_weights = weights + row * weight_stride + heads
            factor = tl.load(own_weights, mask=heads < HEADS, other=0.0)
            found = tl.trans(found.to(dot_type))
            score = tl.dot(q.to(dot_type), found, input_precision="ieee")
            total = tl.sum(tl.maximum(score, 0.0) * factor[:, None], 0)
            total = tl.where(seen, total, float("-inf"))
            tl.store(scores + row * max_len + keys, total, mask=own)


@triton.jit
def _is_set(bits: tl.tensor, index: tl.tensor) -> tl.tensor:
    """Bits `index` `[N]` of one number; those outside 0 to 63 are not set."""
    shifts = tl.minimum(tl.maximum(index, 0), 63).to(tl.int64)
    return (index >= 0) & (index < 64) & (((bits >> shifts) & 1) != 0)


@triton.jit
def _ordered(
    scores: tl.tensor, first: tl.tensor, num_keys: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Numbers of the scores from `first` on that compare as they do; of 0 and -0 the same."""
    places = first + tl.arange(0, BLOCK)
    values = tl.load(scores + places, mask=places < num_keys, other=float("-inf"))
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _lowest_chosen(
    scores: tl.tensor, num_keys: tl.tensor, TOPK: tl.constexpr, BLOCK: tl.constexpr,
    LATER: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The highest number that at least TOPK scores are not below, and how many of those that equal
    it are chosen. A bit at a time, until no more than TOPK are left; the first BLOCK scores stay in
    registers, the others are read in blocks of LATER."""
    own, lowest = _ordered(scores, 0, num_keys, BLOCK), tl.full([], 0, tl.uint32)
    unit, total = tl.full([], 1 << 31, tl.uint32), tl.full([], 0, tl.int32)
    while (unit != 0) & (total != TOPK):
        higher = lowest | unit
        total = tl.sum((own >= higher).to(tl.int32), 0)
        for first in range(BLOCK, num_keys, LATER):
            found = _ordered(scores, first, num_keys, LATER)
            total += tl.sum((found >= higher).to(tl.int32), 0)
        lowest = tl.where(total >= TOPK, higher, lowest)
        unit = unit >> 1
    above = tl.sum((own > lowest).to(tl.int32), 0)
    for first in range(BLOCK, num_keys, LATER):
        above += tl.sum((_ordered(scores, first, num_keys, LATER) > lowest).to(tl.int32), 0)
    return lowest, TOPK - above


@triton.jit
def _write_chosen(
    scores: tl.tensor, table: tl.tensor, slots: tl.tensor, lowest: tl.tensor, num_ties: tl.tensor,
    num_keys: tl.tensor, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Writes the slots of the keys above `lowest`, and of the first ones that equal it, in order.
    Returns their number."""
    num_above, num_equal = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for first in range(0, num_keys, BLOCK):
        found = _ordered(scores, first, num_keys, BLOCK)
        # Both are counted in one scan: 16 bits each, which no block fills.
        both = (found > lowest).to(tl.int32) | ((found == lowest).to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        equal = num_equal + (before >> 16)
        chosen = (found > lowest) | ((found == lowest) & (equal < num_ties))
        places = num_above + (before & 0xFFFF) + tl.minimum(equal, num_ties)
        keys = first + tl.arange(0, BLOCK)
        pages = tl.load(table + keys // PAGE_SIZE, mask=chosen, other=0)
        tl.store(slots + places, pages * PAGE_SIZE + keys % PAGE_SIZE, mask=chosen)
        total = tl.sum(both, 0)
        num_above += total & 0xFFFF
        num_equal += total >> 16
    return num_above + tl.minimum(num_equal, num_ties)


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_OFFSETS)
def choice_kernel(
    scores: tl.tensor, block_tables: tl.tensor, table_stride: tl.tensor, requests: tl.tensor,
    ends: tl.tensor, bits: tl.tensor, slots: tl.tensor, counts: tl.tensor, max_len: tl.tensor,
    TREE: tl.constexpr, TOPK: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    WRITTEN: tl.constexpr, SMALL: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows). Rows of few keys take smaller blocks."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    end, own_scores = tl.load(ends + row), scores + row * max_len
    num_seen, last = tl.maximum(end, 0), end
    if TREE:
        own_bits = tl.load(bits + row)
        num_seen += tl.sum((own_bits >> tl.arange(0, 64).to(tl.int64)) & 1, 0).to(tl.int32)
        last = end + 64
    num_keys = tl.minimum(last, max_len)
    # The number of -inf, which keys that are not seen have: all others are above.
    lowest, num_ties = tl.full([], 0x007FFFFF, tl.uint32), tl.full([], 0, tl.int32)
    table = block_tables + tl.load(requests + row) * table_stride
    own_slots = slots + row * TOPK
    if num_seen > TOPK:
        lowest, num_ties = _lowest_chosen(own_scores, num_keys, TOPK, BLOCK, WRITTEN)
        taken = _write_chosen(
            own_scores, table, own_slots, lowest, num_ties, num_keys, PAGE_SIZE, WRITTEN
        )
    else:
        taken = _write_chosen(
            own_scores, table, own_slots, lowest, num_ties, num_keys, PAGE_SIZE, SMALL
        )
    tl.store(counts + row, taken)
