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

from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.attention.visible_keys import KeySpan, KeySpans, TreeMask, TreePaths
from tllm_spec.kernels.attention.window_attention import plain_window_attention
from tllm_spec.kernels.attention.window_splits import stages_next_to, tile_keys
from tllm_spec.kernels.dispatch import with_kernel
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

    @staticmethod
    def joined(parts: "list[QueryTiles]") -> "QueryTiles":
        table = torch.cat([part.table for part in parts], dim=1)
        return QueryTiles(table, max(part.max_tokens for part in parts))


def tokens_per_tile(group: int) -> int:
    """group: query heads per KV head."""
    return max(1, TILE_ROWS // group)


@dataclass(frozen=True)
class SplitResults:
    """Workspace for the results of the splits. One serves all launches of a stream. Captured graphs
    contain its addresses, so it must live as long as they do."""

    outputs: torch.Tensor
    """[R, D] float32: row (token * Hq + head) * num_splits + split."""
    log_sums: torch.Tensor
    """[R] float32: log2 of the summed weights of those rows."""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> "SplitResults":
        outputs = torch.empty(MAX_PARTIAL_ROWS, head_dim, dtype=torch.float32, device=device)
        return cls(outputs, outputs.new_empty(MAX_PARTIAL_ROWS))


@with_kernel("spread_attention")
def batch_invariant_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults | None,
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
    return plain_batch_invariant_attention(
        q, layer, block_tables, tiles, scale, span, scales, sinks
    )


def spread_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults | None,
    span: KeySpan | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernels of `batch_invariant_attention`."""
    (num_rows, heads, _), (page_size, kv_heads) = q.shape, layer.shape[2:4]
    num_splits = -(-block_tables.shape[1] * page_size // SPLIT_KEYS)
    spreads = (
        results is not None
        and num_splits > 1
        and tiles.table.shape[1] * kv_heads < ENOUGH_PROGRAMS
        and num_rows * heads * num_splits <= MAX_PARTIAL_ROWS
    )
    own_results = results if spreads else None
    return launch_attention(q, layer, block_tables, tiles, scale, own_results, span, scales, sinks)


def launch_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults | None,
    span: KeySpan | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """results: spread splits over programs, or None: a program computes all splits of its tile."""
    from tllm_spec.kernels.attention.batch_invariant_attention_triton import (
        attention_kernel,
        join_kernel,
    )

    assert q.stride(2) == 1 and layer.is_contiguous() and block_tables.stride(1) == 1
    assert tiles.table.is_contiguous() and tiles.table.dtype == torch.int32
    (num_rows, heads, head_dim), (page_size, kv_heads) = q.shape, layer.shape[2:4]
    group, num_tiles, paths = heads // kv_heads, tiles.table.shape[1], tiles.paths
    own_paths = (None, None, 0) if paths is None else (paths.keys, paths.lens, paths.mask.length)
    max_len = block_tables.shape[1] * page_size
    lengths = (max_len, -(-max_len // SPLIT_KEYS), num_tiles)
    output = q.new_empty(num_rows, heads * head_dim)
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
            *(*lengths, own_paths[1]),
            scales.value,
            HAS_CODES=layer.dtype == CODES,
            TREE=paths is not None,
            **fixed,
        )
    return output


def plain_batch_invariant_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    span: KeySpan | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `batch_invariant_attention` with another order of sums. Computes each token as a
    window of its own."""
    if tiles.paths is not None:
        return _plain_trees(q, layer, block_tables, tiles, tiles.paths, scale, span, scales, sinks)
    first, start, count, request = tiles.table.long()
    owner = torch.arange(len(count), device=q.device).repeat_interleave(count)
    offset = torch.arange(len(owner), device=q.device) - (count.cumsum(0) - count)[owner]
    rows = first[owner] + offset
    lengths = (start[owner] + offset + 1).to(torch.int32)
    spans = None if span is None else KeySpans(span, lengths.long() - 1)
    alone = RoundRows.rectangle(len(rows), 1)
    found = plain_window_attention(
        *(q[rows], layer, alone, block_tables[request[owner]], lengths),
        *(scale, None, spans, scales, sinks),
    )
    return torch.empty_like(found).index_copy_(0, rows, found)


def _plain_trees(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    paths: TreePaths,
    scale: float,
    span: KeySpan | None,
    scales: KVScales,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    mask, rows, spans = paths.mask, paths.mask.rows, None
    _, start, _, request = tiles.table.view(4, rows.num_requests, -1)[:, :, 0]
    kv_lens = start + rows.counts + mask.offset
    if span is not None:
        positions = rows.expand(start) + paths.lens - 1
        spans = KeySpans(span, positions.long())
        mask = spans.cut(mask)
    tables = block_tables[request]
    return plain_window_attention(
        q, layer, rows, tables, kv_lens, scale, mask, spans, scales, sinks
    )
