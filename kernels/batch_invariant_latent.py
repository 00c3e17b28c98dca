"""Batch-invariant paged attention over MLA's latents, in the absorbed form for prompts and windows
alike (latent_attention.py): the result of a query has the same bits whatever else is in the launch.

Keys are cut at absolute positions into blocks and splits, and rows of draft trees take the keys of
their path in order, as in batch_invariant_attention.py. A program has a tile: up to TILE_ROWS query
heads of consecutive tokens, or of one token of a tree. Tiles always have the same shape."""

import math

import torch

from tllm_spec.kernels.batch_invariant_attention import (
    ENOUGH_PROGRAMS,
    SPLIT_KEYS,
    QueryTiles,
    SplitResults,
)
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.latent_attention import LatentTables, plain_latent_attention
from tllm_spec.kernels.round_rows import RoundRows
from tllm_spec.kernels.window_splits import power_of_two

TILE_ROWS = 16  # of 512 float32 sums each, twice
TREE_TOKENS = 1  # of a tile, which reads the keys of its token's path


def tokens_per_tile(heads: int) -> int:
    return max(1, TILE_ROWS // heads)


@with_kernel("batch_invariant_latent.spread_latent")
def batch_invariant_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """Each query attends to the keys of its request up to its own position, or to its path. A query
    before position 0, which only a row of graph padding can have, gives zeros.

    Args:
        q_latent: `[T, H, R]`, contiguous: the queries times the key projection.
        q: `[T, H, N + P]`, contiguous; of each head the last P elements are read, rotated.
        layer: `[pages, page_size, R + P]`, contiguous, page_size a power of two; of q's dtype or
            CODES.
        block_tables: `[B, P]` int32, on the device.
        tiles: of the rows, with at most `tokens_per_tile` tokens, of trees TREE_TOKENS.
        scale: factor of the scores before the softmax.
        results: workspace; overwritten.
        scales: of codes.

    Returns:
        `[T, H, R]`: weighted latents.
    """
    return plain_batch_invariant_latent(q_latent, q, layer, block_tables, tiles, scale, scales)


def spread_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """The kernels of `batch_invariant_latent`."""
    num_rows, heads, _ = q_latent.shape
    num_splits = -(-block_tables.shape[1] * layer.shape[1] // SPLIT_KEYS)
    programs = tiles.table.shape[1] * -(-heads // TILE_ROWS)
    fits = num_rows * heads * num_splits <= len(results.outputs)
    spreads = num_splits > 1 and programs < ENOUGH_PROGRAMS and fits
    return launch_latent(
        q_latent, q, layer, block_tables, tiles, scale, results if spreads else None, scales
    )


def launch_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: SplitResults | None,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """results: spread splits over programs, or None: a program computes all splits of its tile."""
    from tllm_spec.kernels.batch_invariant_attention_triton import join_kernel
    from tllm_spec.kernels.batch_invariant_latent_triton import latent_kernel

    for tensor in (q_latent, q, layer, tiles.table):
        assert tensor.is_contiguous()
    assert tiles.table.dtype == torch.int32 and block_tables.stride(1) == 1
    (_, heads, rank), (_, page_size, width) = q_latent.shape, layer.shape
    num_tiles, paths, is_wide = tiles.table.shape[1], tiles.paths, q.element_size() > 2
    own_paths = (None, None, 0) if paths is None else (paths.keys, paths.lens, paths.mask.length)
    max_len = block_tables.shape[1] * page_size
    lengths = (max_len, -(-max_len // SPLIT_KEYS), num_tiles)
    output = torch.empty_like(q_latent)
    latent_kernel[(-(-heads // TILE_ROWS), lengths[1] if results else 1, num_tiles)](
        *(q_latent, q, layer, block_tables, tiles.table),
        results.outputs if results else output,
        results.log_sums if results else None,
        *(scale * scales.key * math.log2(math.e), block_tables.stride(0), *lengths, *own_paths),
        scales.key,
        TREE=paths is not None,
        SPREADS=results is not None,
        HEADS=heads,
        HEAD_DIM=q.shape[2],
        RANK=rank,
        ROPE=width - rank,
        PAGE_SIZE=page_size,
        WIDEN=q.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        SPLIT_KEYS=SPLIT_KEYS,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=16 if is_wide else 32,
        BLOCK_R=power_of_two(rank),
        BLOCK_P=max(16, power_of_two(width - rank)),
        num_warps=4,
        num_stages=2 if is_wide else 3,
        # Fused multiply-adds may depend on the surrounding code.
        enable_fp_fusion=False,
    )
    if results is not None:
        join_kernel[(heads, tiles.max_tokens, num_tiles)](
            *(results.outputs, results.log_sums, None, tiles.table, output),
            *(*lengths, own_paths[1], scales.key),
            HAS_CODES=layer.dtype == CODES,
            TREE=paths is not None,
            SPAN=0,
            HEAD_DIM=rank,
            SPLIT_KEYS=SPLIT_KEYS,
            BLOCK_D=power_of_two(rank),
            enable_fp_fusion=False,
        )
    return output


def plain_batch_invariant_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """Reference of `batch_invariant_latent` with another order of sums."""
    first, start, count, request = tiles.table.long()
    if tiles.paths is not None:
        mask, trees = tiles.paths.mask, tiles.paths.mask.rows
        one = slice(None, None, trees.window)  # the first tile of each request
        lens = (start[one] + trees.counts + mask.offset).to(torch.int32)
        tables = LatentTables(trees, block_tables[request[one]], lens, mask)
        return plain_latent_attention(
            q_latent.transpose(0, 1), q, layer, tables, scale, scales
        ).transpose(0, 1)
    owner = torch.arange(len(count), device=q.device).repeat_interleave(count)
    offset = torch.arange(len(owner), device=q.device) - (count.cumsum(0) - count)[owner]
    rows = first[owner] + offset
    lens = (start[owner] + offset + 1).to(torch.int32)
    alone = RoundRows.rectangle(len(rows), 1)
    tables = LatentTables(alone, block_tables[request[owner]], lens)
    found = plain_latent_attention(
        q_latent[rows].transpose(0, 1), q[rows], layer, tables, scale, scales
    ).transpose(0, 1)
    return torch.empty_like(q_latent).index_copy_(0, rows, found)
