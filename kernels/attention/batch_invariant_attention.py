"""Batch-invariant paged attention: the result of a query has the same bits whatever else is in the
launch (other requests, other queries of its request, the width of the block table, later keys).

The keys of a request are cut at absolute positions: into blocks, which the online softmax takes in
order, and into splits of SPLIT_KEYS, whose results are joined in order. Keys after a query join
with weight zero, which changes no bit of its result. So a token gets the same result as the last of
a chunk, in the middle of another one or in a verified window.

A launch is over tiles: consecutive tokens of one request with all query heads of one KV head. Tiles
always have the same shape and are mostly empty for a single token. With few tiles the splits are
spread over programs; with many they are iterations of one program's loop. Both do the same
operations in the same order.

A row of a draft tree takes its keys in the order of its path: the keys before the tree's region,
then its ancestors, then itself. So it has the bits of the same token in a chain, whatever the tree.
A tile's tokens share the blocks before the region; the others are loaded for each token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tllm_spec.kernels.attention.attention_sinks import sink_scores
from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.attention.visible_keys import (
    KeySpan,
    KeySpans,
    TreeMask,
    TreePaths,
    first_key,
)
from tllm_spec.kernels.attention.window_attention import plain_window_attention
from tllm_spec.kernels.attention.window_splits import (
    WindowWorkspace,
    add_paged_keys,
    stages_next_to,
    tile_keys,
)
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.slots.round_rows import RoundRows

TILE_ROWS = 64  # a row is a query head of a token
SPLIT_KEYS = 256
# From this many programs on (four per multiprocessor of an H200) a program computes all splits of
# its tile.
ENOUGH_PROGRAMS = 528
MAX_PARTIAL_ROWS = 1 << 17


@dataclass(frozen=True)
class QueryTiles:
    """The tiles of a launch."""

    table: torch.Tensor
    """`[4, N]` int32, on the device. Of each tile: its first row of q, the position of that token
    (of trees: the index of their region's first key), its number of tokens (at most
    `tokens_per_tile`), its row of the block tables."""
    max_tokens: int
    """Tokens of the largest tile."""
    paths: TreePaths | None = None
    """The paths to the rows of q, if all of them are rows of trees."""

    @classmethod
    def of_chunk(
        cls, row: int, start: int, length: int, request: int, size: int, device: torch.device
    ) -> "QueryTiles":
        """`length` consecutive tokens in tiles of `size`; the first token has row `row` of q and
        position `start`."""
        offsets = torch.arange(0, length, size, dtype=torch.int32, device=device)
        counts = (length - offsets).clamp_max(size)
        parts = (offsets + row, offsets + start, counts, torch.full_like(offsets, request))
        return cls(torch.stack(parts), min(length, size))

    @classmethod
    def of_chunks(
        cls, lens: Sequence[int], kv_lens: Sequence[int], size: int, device: torch.device
    ) -> "list[QueryTiles]":
        """The context chunks of a forward, which are its first rows and requests. They have `lens`
        tokens each, the last ones of `kv_lens`."""
        ends = accumulate(lens)
        chunks = enumerate(zip(lens, kv_lens, ends, strict=True))
        return [
            cls.of_chunk(end - length, kv_len - length, length, request, size, device)
            for request, (length, kv_len, end) in chunks
        ]

    @classmethod
    def of_windows(
        cls, row: int, kv_lens: torch.Tensor, rows: RoundRows, request: int, size: int
    ) -> "QueryTiles":
        """The last tokens of each of B requests with `kv_lens` `[B]` tokens, as many as it has
        rows. Their rows start at row `row` of q and row `request` of the block tables. Some tiles
        have no tokens, unless the rows are a rectangle."""
        offsets = torch.arange(0, rows.window, size, dtype=torch.int32, device=kv_lens.device)
        number = torch.arange(len(kv_lens), dtype=torch.int32, device=kv_lens.device).unsqueeze(1)
        if rows.offsets is None:
            firsts, counts = number * rows.window, rows.window - offsets
        else:
            firsts, counts = rows.offsets[:-1, None], rows.offsets.diff().unsqueeze(1) - offsets
        parts = (
            firsts + offsets + row,
            (kv_lens - rows.counts).unsqueeze(1) + offsets,
            counts.clamp(0, size),
            number + request,
        )
        table = torch.stack([part.expand(len(kv_lens), len(offsets)) for part in parts]).flatten(1)
        return cls(table, min(rows.window, size))

    @classmethod
    def of_trees(
        cls, kv_lens: torch.Tensor, mask: TreeMask, request: int, size: int
    ) -> "QueryTiles":
        """The rows of trees of B requests with `kv_lens` `[B]` tokens. Their rows of q start at 0,
        those of the block tables at `request`."""
        windows = cls.of_windows(0, kv_lens, mask.rows, request, size)
        windows.table[1].view(len(kv_lens), -1).copy_(mask.starts(kv_lens).unsqueeze(1))
        return cls(windows.table, windows.max_tokens, TreePaths.of(mask))

    def windows(self) -> tuple[torch.Tensor, RoundRows, torch.Tensor, torch.Tensor]:
        """What the references compute instead of tiles: rows of q and the windows that they are,
        trees or each row alone, and of each window its row of the block tables and its length."""
        first, start, count, request = self.table.long()
        if self.paths is not None:
            mask = self.paths.mask
            one = slice(None, None, len(first) // mask.rows.num_requests)  # of each tree
            lens = start[one] + mask.rows.counts + mask.offset
            rows = torch.arange(mask.rows.num_rows, device=first.device)
            return rows, mask.rows, request[one], lens.to(torch.int32)
        owner = torch.arange(len(count), device=count.device).repeat_interleave(count)
        offset = torch.arange(len(owner), device=count.device) - (count.cumsum(0) - count)[owner]
        alone = RoundRows.rectangle(len(owner), 1)
        return first[owner] + offset, alone, request[owner], (start[owner] + offset + 1).int()

    @staticmethod
    def joined(parts: "list[QueryTiles]") -> "QueryTiles":
        table = torch.cat([part.table for part in parts], dim=1)
        return QueryTiles(table, max(part.max_tokens for part in parts))


def tokens_per_tile(group: int) -> int:
    """group: query heads per KV head."""
    return max(1, TILE_ROWS // group)


@with_kernel("launch_attention")
def batch_invariant_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: WindowWorkspace | None,
    span: KeySpan | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each query attends to the keys of its request up to its own position, or to its path.

    Keys after a tile's last token or beyond the block table are never read. A query before position
    0, which only a row of graph padding can have, gives zeros.

    Args:
        q: `[T, Hq, D]`, the last dimension contiguous; every row is in one tile.
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, page_size a power of two; keys at 0,
            values at 1; of q's dtype or CODES.
        block_tables: `[R, P]` int32, on the device.
        tiles: of the rows of q.
        scale: factor of the scores before the softmax.
        results: workspace; overwritten. None: a program computes all splits of its tile.
        span: the keys that a query sees. None: all up to its own.
        scales: of codes.
        sinks: `[Hq]` float32, contiguous: one more score of each head, which has no value; None:
            no sinks.

    Returns:
        `[T, Hq * D]`.
    """
    rows, own, requests, kv_lens = tiles.windows()
    tree, spans = None if tiles.paths is None else tiles.paths.mask, None
    if span is not None:
        positions = kv_lens - 1
        if tiles.paths is not None:
            positions = own.expand(tiles.paths.mask.starts(kv_lens)) + tiles.paths.lens - 1
        spans = KeySpans(span, positions.long())
        tree = None if tree is None else spans.cut(tree)
    found = plain_window_attention(
        *(q[rows], layer, own, block_tables[requests], kv_lens, scale),
        *(tree, spans, scales, sinks),
    )
    return torch.empty_like(found).index_copy_(0, rows, found)


def launch_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: WindowWorkspace | None,
    span: KeySpan | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels of `batch_invariant_attention`."""
    assert q.stride(2) == 1 and layer.is_contiguous() and block_tables.stride(1) == 1
    assert tiles.table.is_contiguous() and tiles.table.dtype == torch.int32
    (num_rows, heads, head_dim), (page_size, kv_heads) = q.shape, layer.shape[2:4]
    group, num_tiles, paths = heads // kv_heads, tiles.table.shape[1], tiles.paths
    own_paths = (None, None, 0) if paths is None else (paths.keys, paths.lens, paths.mask.length)
    max_len = block_tables.shape[1] * page_size
    lengths = (max_len, -(-max_len // SPLIT_KEYS), num_tiles)
    output = q.new_empty(num_rows, heads * head_dim)
    if results is not None and not (
        lengths[1] > 1
        and num_tiles * kv_heads < ENOUGH_PROGRAMS
        and num_rows * heads * lengths[1] <= len(results.outputs)
    ):
        results = None  # splits are not spread over programs
    block_m = max(TILE_ROWS, 1 << (group - 1).bit_length())
    block_d = 1 << (head_dim - 1).bit_length()
    # Without contraction to fused multiply-adds, which may depend on the surrounding code.
    fixed = {"HEAD_DIM": head_dim, "SPLIT_KEYS": SPLIT_KEYS, "BLOCK_D": block_d}
    fixed["SPAN"] = span.code if span else 0
    fixed["enable_fp_fusion"] = False
    attention_kernel[(kv_heads, lengths[1] if results else 1, num_tiles)](
        *(q, sinks, layer, block_tables, tiles.table),
        results.outputs if results else output,
        results.log_sums if results else None,
        scale * scales.key * math.log2(math.e),
        *(*q.stride()[:2], layer.stride(0), block_tables.stride(0), *lengths, *own_paths),
        scales.value,
        GROUP=group,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        TREE=paths is not None,
        SPREADS=results is not None,
        WIDEN=q.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        BLOCK_M=block_m,
        BLOCK_N=tile_keys(q, layer, block_d),
        num_warps=4 if block_d <= 128 else 8,
        num_stages=stages_next_to(q, block_m, block_d),
        **fixed,
    )
    if results is not None:
        join_kernel[(heads, tiles.max_tokens, num_tiles)](
            *(results.outputs, results.log_sums, sinks, tiles.table, output),
            *(*lengths, own_paths[1], scales.value),
            HAS_CODES=layer.dtype == CODES,
            TREE=paths is not None,
            **fixed,
        )
    return output


# Within a split the softmax is online, in powers of two. Splits are joined by their log-sums (as in
# Dao et al., "Flash-Decoding for long-context inference", 2023), in order. Keys that a row does not
# see change none of its bits: the row's maximum stays, so its decay is 2**0 = 1, and their weights
# are 2**-inf = 0. That holds for the keys before a row's span, too: its state stays empty. A sink
# is joined before the first split, with the mean 0.


_LENGTHS = ["max_len", "num_splits", "num_tiles"]


@triton.jit
def _add_paths(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, queries: tl.tensor, positions: tl.tensor,
    pool: tl.tensor, tile: tl.tensor, first: tl.tensor, end: tl.tensor, SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state after the blocks at `first` to `end`, which have keys of the tree's region:
    position start + i of a row is key i of its path. A token's update changes its own rows only."""
    start, tokens, first_row, count, paths, path_lens, region = tile
    for block in tl.range(first, end, BLOCK_N):
        key_positions = block + tl.arange(0, BLOCK_N)
        in_region = key_positions >= start
        for token in tl.range(0, count):
            row = (first_row + token).to(tl.int64)
            own = key_positions < tl.minimum(start + tl.load(path_lens + row), end)
            path = paths + row * region + (key_positions - start)
            keys = start + tl.load(path, mask=own & in_region, other=0)
            seen = own[None, :]
            if SPAN:
                own = own & (key_positions >= first_key(start, SPAN))
                seen = seen & (key_positions[None, :] >= first_key(positions, SPAN)[:, None])
            keys = tl.where(in_region, keys, key_positions)
            new_top, new_total, new_mixed = add_paged_keys(
                top, total, mixed, queries, pool, keys, own, seen
            )
            is_own = tokens == token
            top, total = tl.where(is_own, new_top, top), tl.where(is_own, new_total, total)
            mixed = tl.where(is_own[:, None], new_mixed, mixed)
    return top, total, mixed


@triton.jit
def _attend(
    queries: tl.tensor, positions: tl.tensor, pool: tl.tensor, tile: tl.tensor, first: tl.tensor,
    end: tl.tensor, TREE: tl.constexpr, SPAN: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """One split, the keys at positions `first` to `end`: each row's weighted mean of the values,
    and log2 of the sum of its weights. tile: the first row's position or of trees the region's
    start, each row's token in the tile, the first token's row, their number, and the paths."""
    start = tile[0]
    top = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    mixed = tl.zeros(queries.shape, tl.float32)
    if SPAN:  # the first row sees the earliest keys
        first = tl.maximum(first, first_key(start, SPAN) // BLOCK_N * BLOCK_N)
    common_end = end
    if TREE:  # blocks without keys of the region
        common_end = tl.minimum(end, tl.maximum(start // BLOCK_N * BLOCK_N, first))
    for block in tl.range(first, common_end, BLOCK_N):
        key_positions = block + tl.arange(0, BLOCK_N)
        own = key_positions < common_end
        seen = own[None, :] & (key_positions[None, :] <= positions[:, None])
        if SPAN:  # keys that no row sees may have no page any more
            own = own & (key_positions >= first_key(start, SPAN))
            seen = seen & (key_positions[None, :] >= first_key(positions, SPAN)[:, None])
        top, total, mixed = add_paged_keys(
            top, total, mixed, queries, pool, key_positions, own, seen
        )
    if TREE:
        top, total, mixed = _add_paths(
            top, total, mixed, queries, positions, pool, tile, common_end, end, SPAN, BLOCK_N
        )
    mean = tl.div_rn(mixed, tl.where(total == 0.0, 1.0, total)[:, None])
    return mean, top + tl.log2(total)


@triton.jit
def join(top: tl.tensor, log_sum: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The new maximum of the log-sums, and relative to it the weights of the splits joined so far
    and of the next split."""
    new_top = tl.maximum(top, log_sum)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(top - base), tl.exp2(log_sum - base)


@triton.jit
def _attend_all(
    queries: tl.tensor, sinks: tl.tensor, heads: tl.tensor, positions: tl.tensor, pool: tl.tensor,
    tile: tl.tensor, length: tl.tensor, TREE: tl.constexpr, SPAN: tl.constexpr,
    SPLIT_KEYS: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """All splits of `length` keys, joined."""
    top = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    mean = tl.zeros(queries.shape, tl.float32)
    if sinks is not None:
        top, total = sink_scores(sinks, heads), total + 1.0
    begin = first_key(tile[0], SPAN) // SPLIT_KEYS * SPLIT_KEYS if SPAN else 0
    for first in tl.range(begin, length, SPLIT_KEYS):
        end = tl.minimum(first + SPLIT_KEYS, length)
        own, log_sum = _attend(queries, positions, pool, tile, first, end, TREE, SPAN, BLOCK_N)
        top, decay, weight = join(top, log_sum)
        total = total * decay + weight
        mean = mean * decay[:, None] + own * weight[:, None]
    return tl.div_rn(mean, tl.where(total == 0.0, 1.0, total)[:, None])


@triton.jit(do_not_specialize=["table_stride", *_LENGTHS, "region"])
def attention_kernel(
    q: tl.tensor, sinks: tl.tensor, layer: tl.tensor, block_tables: tl.tensor, tiles: tl.tensor,
    output: tl.tensor, log_sums: tl.tensor, log2_scale: tl.tensor,
    token_stride: tl.tensor, head_stride: tl.tensor, value_offset: tl.tensor,
    table_stride: tl.tensor, max_len: tl.tensor, num_splits: tl.tensor, num_tiles: tl.tensor,
    paths: tl.tensor, path_lens: tl.tensor, region: tl.tensor,
    value_scale: tl.tensor, TREE: tl.constexpr, SPAN: tl.constexpr,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPREADS: tl.constexpr, WIDEN: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (KV heads, splits or 1, tiles). The last tiles of a chunk have the most keys, so they
    start first."""
    kv_head, split = tl.program_id(0), tl.program_id(1)
    tile = tiles + num_tiles - 1 - tl.program_id(2)
    first_row, start = tl.load(tile), tl.load(tile + num_tiles)
    count = tl.load(tile + 2 * num_tiles)
    table = block_tables + tl.load(tile + 3 * num_tiles).to(tl.int64) * table_stride
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens, lens = rows // GROUP, rows // GROUP + 1
    if TREE:
        lens = tl.load(path_lens + first_row + tokens, mask=tokens < count, other=0)
        count_seen = tl.max(lens, 0)
    else:
        count_seen = count
    length = tl.minimum(start + count_seen, max_len)
    if SPREADS and split * SPLIT_KEYS >= length:  # join_kernel skips it
        return
    if SPAN and SPREADS and (split + 1) * SPLIT_KEYS <= first_key(start, SPAN):
        return

    heads = kv_head * GROUP + rows % GROUP
    real = (tokens < count)[:, None] & (dims < HEAD_DIM)[None, :]
    token_offsets = (first_row + tokens).to(tl.int64)[:, None] * token_stride
    dot_type: tl.constexpr = tl.float32 if WIDEN else q.dtype.element_ty
    queries = tl.load(
        q + token_offsets + (heads * head_stride)[:, None] + dims, mask=real, other=0.0
    ).to(dot_type)
    out_rows = (first_row + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    pool = (layer, value_offset, table, kv_head, log2_scale, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    own_tile = (start, tokens, first_row, count, paths, path_lens, region)
    if SPREADS:
        first = split * SPLIT_KEYS
        mean, log_sum = _attend(
            queries, start + lens - 1, pool, own_tile, first,
            tl.minimum(first + SPLIT_KEYS, length), TREE, SPAN, BLOCK_N,
        )  # fmt: skip
        out_rows = out_rows * num_splits + split
        tl.store(log_sums + out_rows, log_sum, mask=tokens < count)
    else:
        mean = _attend_all(
            queries, sinks, heads, start + lens - 1, pool, own_tile, length, TREE, SPAN, SPLIT_KEYS,
            BLOCK_N,
        )  # fmt: skip
        if layer.dtype.element_ty == tl.float8e4nv:
            mean *= value_scale
    pointers = output + out_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, mean.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=_LENGTHS)
def join_kernel(
    means: tl.tensor, log_sums: tl.tensor, sinks: tl.tensor, tiles: tl.tensor, output: tl.tensor,
    max_len: tl.tensor, num_splits: tl.tensor, num_tiles: tl.tensor, path_lens: tl.tensor,
    value_scale: tl.tensor, HAS_CODES: tl.constexpr, TREE: tl.constexpr, SPAN: tl.constexpr,
    HEAD_DIM: tl.constexpr, SPLIT_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (query heads, tokens of a tile, tiles). Reads only the splits that had keys: the others
    hold results of an earlier launch."""
    token, tile = tl.program_id(1), tiles + tl.program_id(2)
    first_row, start = tl.load(tile), tl.load(tile + num_tiles)
    count = tl.load(tile + 2 * num_tiles)
    if token >= count:
        return
    seen = tl.load(path_lens + first_row + token) if TREE else token + 1
    length = tl.minimum(start + seen, max_len)
    row = (first_row + token).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    top, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    mean = tl.zeros([BLOCK_D], tl.float32)
    if sinks is not None:
        top, total = sink_scores(sinks, tl.program_id(0)), total + 1.0
    first = first_key(start + seen - 1, SPAN) // SPLIT_KEYS if SPAN else 0
    for split in tl.range(first, tl.cdiv(length, SPLIT_KEYS)):
        part = row * num_splits + split
        own = tl.load(means + part * HEAD_DIM + dims, mask=real, other=0.0)
        top, decay, weight = join(top, tl.load(log_sums + part))
        total = total * decay + weight
        mean = mean * decay + own * weight
    mean = tl.div_rn(mean, tl.where(total == 0.0, 1.0, total))
    if HAS_CODES:
        mean *= value_scale
    tl.store(output + row * HEAD_DIM + dims, mean.to(output.dtype.element_ty), mask=real)
