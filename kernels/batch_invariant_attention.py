"""Paged attention whose result for a query has the same bits whatever stands around it: other
requests, other queries of its own request, the block table's width, how many keys follow.

The keys of a request are cut at absolute positions: into blocks, which the online softmax takes one
after another, and into splits of SPLIT_KEYS, whose results are joined from the first to the last.
What lies behind a query joins with weight zero, which changes no bit of it. So a token gets the
same result as the last of one chunk, the middle of another
or one of a verified window: prompts and windows run through the same launch.

A launch is over tiles: some consecutive tokens of one request with all query heads of one KV head.
A tile has the same shape everywhere and is mostly empty for a single token. Splits are spread over
programs where there are few tiles, and are the rounds of one program's loop where there are many:
the same operations."""

import math
from dataclasses import dataclass

import torch

from tllm_spec.kernels.triton_support import has_kernels
from tllm_spec.kernels.window_attention import plain_window_attention

TILE_ROWS = 64  # query heads of some tokens
SPLIT_KEYS = 256
# The keys, and as many values, that are on their way while a program computes on those before.
TILE_BYTES = 16384
MAX_TILE_KEYS = 128
NUM_STAGES = 3
# With more programs than this (four for each multiprocessor of an H200) a tile's splits stay in
# one.
ENOUGH_PROGRAMS = 528
MAX_PARTIAL_ROWS = 1 << 17


@dataclass(frozen=True)
class QueryTiles:
    """`places` `[4, N]` int32, on the device, of each tile: its first row of q, the position of
    that token, how many tokens it has (`tokens_per_tile` at most), its row of the block tables."""

    places: torch.Tensor
    longest: int
    """Tokens of the longest tile, host."""

    @classmethod
    def of_chunk(
        cls, row: int, start: int, length: int, request: int, size: int, device: torch.device
    ) -> "QueryTiles":
        """`length` consecutive tokens, the first of them at row `row` and position `start`, in
        tiles of `size`."""
        offsets = torch.arange(0, length, size, dtype=torch.int32, device=device)
        counts = (length - offsets).clamp_max(size)
        places = (offsets + row, offsets + start, counts, torch.full_like(offsets, request))
        return cls(torch.stack(places), min(length, size))

    @classmethod
    def of_windows(
        cls, row: int, kv_lens: torch.Tensor, window: int, request: int, size: int
    ) -> "QueryTiles":
        """The last `window` tokens of requests of `kv_lens` `[B]` tokens, from row `row` of q and
        row `request` of the block tables on."""
        offsets = torch.arange(0, window, size, dtype=torch.int32, device=kv_lens.device)
        number = torch.arange(len(kv_lens), dtype=torch.int32, device=kv_lens.device).unsqueeze(1)
        counts = (window - offsets).clamp_max(size)
        parts = (
            number * window + offsets + row,
            kv_lens.unsqueeze(1) - window + offsets,
            counts,
            number + request,
        )
        places = torch.stack([part.expand(len(kv_lens), len(offsets)) for part in parts]).flatten(1)
        return cls(places, min(window, size))

    @staticmethod
    def joined(parts: "list[QueryTiles]") -> "QueryTiles":
        places = torch.cat([part.places for part in parts], dim=1)
        return QueryTiles(places, max(part.longest for part in parts))


def tokens_per_tile(group: int) -> int:
    """`group`: query heads of a KV head."""
    return max(1, TILE_ROWS // group)


@dataclass(frozen=True)
class SplitResults:
    """Where splits leave their results. One serves all launches of one stream; its addresses are
    part of every captured graph, so it lives as long as they do."""

    outputs: torch.Tensor
    """[R, D] float32: row (token * Hq + head) * num_splits + split."""
    log_sums: torch.Tensor
    """[R] float32: log2 of the summed weights of those rows."""

    @classmethod
    def allocate(cls, head_dim: int, device: torch.device) -> "SplitResults":
        outputs = torch.empty(MAX_PARTIAL_ROWS, head_dim, dtype=torch.float32, device=device)
        return cls(outputs, outputs.new_empty(MAX_PARTIAL_ROWS))


def batch_invariant_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults,
) -> torch.Tensor:
    """Each query sees the keys of its request up to its own position.

    Keys behind a tile's last token and beyond the block table are never read. A query before
    position 0, which only a row of graph padding can have, gives zeros.

    Args:
        q: `[T, Hq, D]`, any strides but the last; every row is in one tile.
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, page_size a power of two; keys at 0,
        values at 1.
        block_tables: `[R, P]` int32, on the device.
        tiles: of the rows of q.
        scale: of the scores before the softmax.
        results: overwritten.

    Returns:
        `[T, Hq * D]`.
    """
    if not has_kernels(q.device):
        return plain_batch_invariant_attention(q, layer, block_tables, tiles, scale)
    (num_rows, heads, _), (page_size, kv_heads) = q.shape, layer.shape[2:4]
    num_splits = -(-block_tables.shape[1] * page_size // SPLIT_KEYS)
    spreads = (
        num_splits > 1
        and tiles.places.shape[1] * kv_heads < ENOUGH_PROGRAMS
        and num_rows * heads * num_splits <= MAX_PARTIAL_ROWS
    )
    return launch_attention(q, layer, block_tables, tiles, scale, results if spreads else None)


def launch_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults | None,
) -> torch.Tensor:
    """results: where splits are spread over programs; None: each program has all splits of its
    tile."""
    from tllm_spec.kernels.batch_invariant_attention_triton import attention_kernel, join_kernel

    assert q.stride(2) == 1 and layer.is_contiguous() and block_tables.stride(1) == 1
    assert tiles.places.is_contiguous() and tiles.places.dtype == torch.int32
    (num_rows, heads, head_dim), (page_size, kv_heads) = q.shape, layer.shape[2:4]
    block_d, num_tiles = 1 << (head_dim - 1).bit_length(), tiles.places.shape[1]
    max_len = block_tables.shape[1] * page_size
    num_splits = -(-max_len // SPLIT_KEYS)
    output = q.new_empty(num_rows, heads * head_dim)
    # No contraction to multiply-adds: where it happens may depend on the code around.
    fixed = {
        "HEAD_DIM": head_dim,
        "SPLIT_KEYS": SPLIT_KEYS,
        "BLOCK_D": block_d,
        "enable_fp_fusion": False,
    }
    attention_kernel[(kv_heads, num_splits if results else 1, num_tiles)](
        q,
        layer,
        block_tables,
        tiles.places,
        results.outputs if results else output,
        results.log_sums if results else None,
        scale * math.log2(math.e),
        *q.stride()[:2],
        layer.stride(0),
        block_tables.stride(0),
        max_len,
        num_splits,
        num_tiles,
        GROUP=heads // kv_heads,
        KV_HEADS=kv_heads,
        PAGE_SIZE=page_size,
        SPREADS=results is not None,
        WIDEN=q.device.type
        == "cpu",  # Triton's interpreter multiplies the bits of bfloat16 numbers
        BLOCK_M=max(TILE_ROWS, 1 << (heads // kv_heads - 1).bit_length()),
        BLOCK_N=max(16, min(MAX_TILE_KEYS, TILE_BYTES // (block_d * layer.element_size()))),
        num_warps=4 if block_d <= 128 else 8,
        num_stages=NUM_STAGES,
        **fixed,
    )
    if results is not None:
        join_kernel[(heads, tiles.longest, num_tiles)](
            results.outputs,
            results.log_sums,
            tiles.places,
            output,
            max_len,
            num_splits,
            num_tiles,
            **fixed,
        )
    return output


def plain_batch_invariant_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
) -> torch.Tensor:
    """The reference of `batch_invariant_attention`, but for the order of its sums: every token a
    request of its own."""
    first, start, count, request = tiles.places.long()
    owner = torch.arange(len(count), device=q.device).repeat_interleave(count)
    offset = torch.arange(len(owner), device=q.device) - (count.cumsum(0) - count)[owner]
    rows = first[owner] + offset
    lengths = (start[owner] + offset + 1).to(torch.int32)
    found = plain_window_attention(
        q[rows, None], layer, block_tables[request[owner]], lengths, scale
    )
    return torch.empty_like(found[:, 0]).index_copy_(0, rows, found[:, 0])
