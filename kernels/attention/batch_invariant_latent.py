"""Batch-invariant paged attention over MLA's latents, in the absorbed form for prompts and windows
alike (latent_attention.py): the result of a query has the same bits whatever else is in the launch.

Keys are cut at absolute positions into blocks and splits, and rows of draft trees take the keys of
their path in order, as in batch_invariant_attention.py. A program has a tile: up to TILE_ROWS query
heads of consecutive tokens, or of one token of a tree. Tiles always have the same shape."""

import math

import torch

from tllm_spec.kernels.attention.batch_invariant_attention import (
    ENOUGH_PROGRAMS,
    SPLIT_KEYS,
    QueryTiles,
    join,
    join_kernel,
)
from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.attention.latent_attention import (
    LatentTables,
    latent_scores,
    load_queries,
    plain_latent_attention,
)
from tllm_spec.kernels.attention.window_splits import WindowWorkspace, add_keys, power_of_two
from tllm_spec.kernels.dispatch import tl, triton, with_kernel

TILE_ROWS = 16  # of 512 float32 sums each, twice
TREE_TOKENS = 1  # of a tile, which reads the keys of its token's path


def latent_tokens_per_tile(heads: int) -> int:
    return max(1, TILE_ROWS // heads)


@with_kernel("launch_latent")
def batch_invariant_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: WindowWorkspace | None,
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
        tiles: of the rows, with at most `latent_tokens_per_tile` tokens, of trees TREE_TOKENS.
        scale: factor of the scores before the softmax.
        results: workspace; overwritten. None: a program computes all splits of its tile.
        scales: of codes.

    Returns:
        `[T, H, R]`: weighted latents.
    """
    rows, own, requests, kv_lens = tiles.windows()
    tree = None if tiles.paths is None else tiles.paths.mask
    tables = LatentTables(own, block_tables[requests], kv_lens, tree)
    found = plain_latent_attention(
        q_latent[rows].transpose(0, 1), q[rows], layer, tables, scale, scales
    ).transpose(0, 1)
    return torch.empty_like(q_latent).index_copy_(0, rows, found)


def launch_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    results: WindowWorkspace | None,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """The kernels of `batch_invariant_latent`."""
    assert all(each.is_contiguous() for each in (q_latent, q, layer, tiles.table))
    assert tiles.table.dtype == torch.int32 and block_tables.stride(1) == 1
    (_, heads, rank), (_, page_size, width) = q_latent.shape, layer.shape
    num_tiles, paths, is_wide = tiles.table.shape[1], tiles.paths, q.element_size() > 2
    own_paths = (None, None, 0) if paths is None else (paths.keys, paths.lens, paths.mask.length)
    max_len, output = block_tables.shape[1] * page_size, torch.empty_like(q_latent)
    lengths = (max_len, -(-max_len // SPLIT_KEYS), num_tiles)
    if results is not None and not (
        lengths[1] > 1
        and num_tiles * -(-heads // TILE_ROWS) < ENOUGH_PROGRAMS
        and len(q_latent) * heads * lengths[1] <= len(results.outputs)
    ):
        results = None  # splits are not spread over programs
    latent_kernel[(-(-heads // TILE_ROWS), lengths[1] if results else 1, num_tiles)](
        *(q_latent, q, layer, block_tables, tiles.table),
        *((results.outputs, results.log_sums) if results else (output, None)),
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


# How keys that a row does not see leave its bits alone is in batch_invariant_attention.py.


_LENGTHS = ["table_stride", "max_len", "num_splits", "num_tiles", "region"]


@triton.jit
def _attend(
    queries: tl.tensor, positions: tl.tensor, pool: tl.tensor, path: tl.tensor, start: tl.tensor,
    first: tl.tensor, end: tl.tensor, TREE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """One split, the keys at positions `first` to `end`: each row's weighted mean of the latents,
    and log2 of the sum of its weights. Of a tree, position start + i is key i of the path."""
    top = tl.full([queries[0].shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries[0].shape[0]], tl.float32)
    mixed = tl.zeros(queries[0].shape, tl.float32)
    for block in tl.range(first, end, BLOCK_N):
        key_positions = block + tl.arange(0, BLOCK_N)
        own, keys = key_positions < end, key_positions
        if TREE:
            in_region = own & (key_positions >= start)
            on_path = tl.load(path + (key_positions - start), mask=in_region, other=0)
            keys = tl.where(in_region, start + on_path, key_positions)
        pages = tl.load(pool[1] + keys // pool[5], mask=own, other=0)
        latents, scores = latent_scores(queries, pool, pages, keys, own)
        seen = own[None, :] & (key_positions[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        top, total, mixed = add_keys(top, total, mixed, scores, latents)
    mean = tl.div_rn(mixed, tl.where(total == 0.0, 1.0, total)[:, None])
    return mean, top + tl.log2(total)


@triton.jit
def _attend_all(
    queries: tl.tensor, positions: tl.tensor, pool: tl.tensor, path: tl.tensor, start: tl.tensor,
    length: tl.tensor, TREE: tl.constexpr, SPLIT_KEYS: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """All splits of `length` keys, joined."""
    top = tl.full([queries[0].shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries[0].shape[0]], tl.float32)
    mean = tl.zeros(queries[0].shape, tl.float32)
    for first in tl.range(0, length, SPLIT_KEYS):
        end = tl.minimum(first + SPLIT_KEYS, length)
        own, log_sum = _attend(queries, positions, pool, path, start, first, end, TREE, BLOCK_N)
        top, decay, weight = join(top, log_sum)
        total = total * decay + weight
        mean = mean * decay[:, None] + own * weight[:, None]
    return tl.div_rn(mean, tl.where(total == 0.0, 1.0, total)[:, None])


@triton.jit(do_not_specialize=_LENGTHS)
def latent_kernel(
    q_latent: tl.tensor, q: tl.tensor, layer: tl.tensor, block_tables: tl.tensor, tiles: tl.tensor,
    output: tl.tensor, log_sums: tl.tensor, log2_scale: tl.tensor, table_stride: tl.tensor,
    max_len: tl.tensor, num_splits: tl.tensor, num_tiles: tl.tensor, paths: tl.tensor,
    path_lens: tl.tensor, region: tl.tensor, latent_scale: tl.tensor, TREE: tl.constexpr,
    SPREADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDEN: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (blocks of heads, splits or 1, tiles). The last tiles of a chunk have the most keys, so
    they start first."""
    OWN_HEADS: tl.constexpr = HEADS if HEADS < BLOCK_M else BLOCK_M
    split, tile = tl.program_id(1), tiles + num_tiles - 1 - tl.program_id(2)
    first_row, start = tl.load(tile).to(tl.int64), tl.load(tile + num_tiles)
    count = tl.load(tile + 2 * num_tiles)
    table = block_tables + tl.load(tile + 3 * num_tiles).to(tl.int64) * table_stride
    in_tile, ranks = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    tokens = in_tile // OWN_HEADS
    heads = tl.program_id(0) * OWN_HEADS + in_tile % OWN_HEADS
    lens, num_seen, path = tokens + 1, count, None
    if TREE:
        num_seen, path = tl.load(path_lens + first_row), paths + first_row * region
        lens = num_seen + tl.zeros([BLOCK_M], tl.int32)
    length = tl.minimum(start + num_seen, max_len)
    if SPREADS and split * SPLIT_KEYS >= length:  # join_kernel skips it
        return

    is_real = (tokens < count) & (heads < HEADS)
    rows = (first_row + tokens) * HEADS + heads
    dot_type: tl.constexpr = tl.float32 if WIDEN else q.dtype.element_ty
    absorbed, rotated = load_queries(
        q_latent, q, rows, rows, is_real, RANK, ROPE, HEAD_DIM, BLOCK_R, BLOCK_P,
    )  # fmt: skip
    queries, positions = (absorbed.to(dot_type), rotated.to(dot_type)), start + lens - 1
    pool = (layer, table, log2_scale, RANK, ROPE, PAGE_SIZE)
    if SPREADS:
        first = split * SPLIT_KEYS
        end = tl.minimum(first + SPLIT_KEYS, length)
        mean, log_sum = _attend(queries, positions, pool, path, start, first, end, TREE, BLOCK_N)
        rows = rows * num_splits + split
        tl.store(log_sums + rows, log_sum, mask=is_real)
    else:
        mean = _attend_all(queries, positions, pool, path, start, length, TREE, SPLIT_KEYS, BLOCK_N)
        if layer.dtype.element_ty == tl.float8e4nv:
            mean *= latent_scale
    targets = output + rows[:, None] * RANK + ranks[None, :]
    real = is_real[:, None] & (ranks < RANK)[None, :]
    tl.store(targets, mean.to(output.dtype.element_ty), mask=real)
