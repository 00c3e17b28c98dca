"""The Triton kernels of batch_invariant_attention.py, which describes inputs and outputs. Importing
this file imports Triton.

Within a split the softmax is the online softmax (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018) in powers of two. Splits are joined by their log-sums (as in Dao et
al., "Flash-Decoding for long-context inference", 2023), in order. Keys that a row does not see
change none of its bits: the row's maximum stays, so its decay is 2**0 = 1, and their weights are
2**-inf = 0. That holds for the keys before a row's span, too: its state stays empty. A sink is
joined before the first split, with the mean 0."""

import triton
import triton.language as tl

from tllm_spec.kernels.attention.attention_sinks import sink_scores
from tllm_spec.kernels.attention.visible_keys import first_key
from tllm_spec.kernels.attention.window_splits import add_paged_keys

_LENGTHS = ["max_len", "num_splits", "num_tiles"]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def join(top: tl.tensor, log_sum: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The new maximum of the log-sums, and relative to it the weights of the splits joined so far
    and of the next split."""
    new_top = tl.maximum(top, log_sum)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(top - base), tl.exp2(log_sum - base)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
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


# fmt: off
@triton.jit(do_not_specialize=["table_stride", *_LENGTHS, "region"])  # type: ignore[untyped-decorator]  # triton has no types
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
) -> None:
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
        )
        out_rows = out_rows * num_splits + split
        tl.store(log_sums + out_rows, log_sum, mask=tokens < count)
    else:
        mean = _attend_all(
            queries, sinks, heads, start + lens - 1, pool, own_tile, length,
            TREE, SPAN, SPLIT_KEYS, BLOCK_N,
        )
        if layer.dtype.element_ty == tl.float8e4nv:
            mean *= value_scale
    pointers = output + out_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, mean.to(output.dtype.element_ty), mask=real)
# fmt: on


@triton.jit(do_not_specialize=_LENGTHS)  # type: ignore[untyped-decorator]  # triton has no types
def join_kernel(
    means: tl.tensor,
    log_sums: tl.tensor,
    sinks: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    num_tiles: tl.tensor,
    path_lens: tl.tensor,
    value_scale: tl.tensor,
    HAS_CODES: tl.constexpr,
    TREE: tl.constexpr,
    SPAN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Grid (query heads, tokens of a tile, tiles). Reads only the splits that had keys: the others
    hold results of an earlier launch."""
    token, tile = tl.program_id(1), tiles + tl.program_id(2)
    first_row, start, count = (
        tl.load(tile),
        tl.load(tile + num_tiles),
        tl.load(tile + 2 * num_tiles),
    )
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
