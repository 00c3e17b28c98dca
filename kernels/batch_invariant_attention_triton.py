"""The Triton kernels of batch_invariant_attention.py, which describes inputs and outputs. Importing
this file imports Triton.

Within a split the softmax is the online softmax (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018) in powers of two. Splits are joined by their log-sums (as in Dao et
al., "Flash-Decoding for long-context inference", 2023), in order. Keys that a row does not see
change none of its bits: the row's maximum stays, so its decay is 2**0 = 1, and their weights are
2**-inf = 0."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend(
    queries: tl.tensor,
    positions: tl.tensor,
    layer: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    log2_scale: tl.tensor,
    value_offset: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """One split, the keys at positions `first` to `end`: each row's weighted mean of the values,
    and log2 of the sum of its weights."""
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(first, end, BLOCK_N):
        key_positions = start + tl.arange(0, BLOCK_N)
        own = key_positions < end
        pages = tl.load(table + key_positions // PAGE_SIZE, mask=own, other=0)
        # A pool may have more than 2**31 elements.
        slots = pages.to(tl.int64) * PAGE_SIZE + key_positions % PAGE_SIZE
        pointers = layer + (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        # Values after the end may be NaN, and 0 * NaN is NaN, so they must be loaded as zeros.
        present = own[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(pointers, mask=present, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * log2_scale
        seen = own[None, :] & (key_positions[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: no key seen so far
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        values = tl.load(pointers + value_offset, mask=present, other=0.0).to(queries.dtype)
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(
            weights.to(queries.dtype), values, mixed * decay[:, None], input_precision="ieee"
        )
        top = new_top
    mean = tl.div_rn(mixed, tl.where(total == 0.0, 1.0, total)[:, None])
    return mean, top + tl.log2(total)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _join(top: tl.tensor, log_sum: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The new maximum of the log-sums, and relative to it the weights of the splits joined so far
    and of the next split."""
    new_top = tl.maximum(top, log_sum)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, tl.exp2(top - base), tl.exp2(log_sum - base)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend_all(
    queries: tl.tensor,
    positions: tl.tensor,
    layer: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    length: tl.tensor,
    log2_scale: tl.tensor,
    value_offset: tl.tensor,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """All splits of `length` keys, joined."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in tl.range(0, length, SPLIT_KEYS):
        own, log_sum = _attend(
            queries, positions, layer, table, kv_head, first,
            tl.minimum(first + SPLIT_KEYS, length), log2_scale, value_offset,
            KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        top, decay, weight = _join(top, log_sum)
        total = total * decay + weight
        mean = mean * decay[:, None] + own * weight[:, None]
    return tl.div_rn(mean, tl.where(total == 0.0, 1.0, total)[:, None])


# fmt: off
@triton.jit(do_not_specialize=["table_stride", "max_len", "num_splits", "num_tiles"])  # type: ignore[untyped-decorator]  # triton has no types
def attention_kernel(
    q: tl.tensor, layer: tl.tensor, block_tables: tl.tensor, tiles: tl.tensor,
    output: tl.tensor, log_sums: tl.tensor, log2_scale: tl.tensor,
    token_stride: tl.tensor, head_stride: tl.tensor, value_offset: tl.tensor,
    table_stride: tl.tensor, max_len: tl.tensor, num_splits: tl.tensor, num_tiles: tl.tensor,
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
    length = tl.minimum(start + count, max_len)
    if SPREADS and split * SPLIT_KEYS >= length:  # join_kernel skips it
        return

    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    real = (tokens < count)[:, None] & (dims < HEAD_DIM)[None, :]
    token_offsets = (first_row + tokens).to(tl.int64)[:, None] * token_stride
    dot_type: tl.constexpr = tl.float32 if WIDEN else layer.dtype.element_ty
    queries = tl.load(
        q + token_offsets + (heads * head_stride)[:, None] + dims, mask=real, other=0.0
    ).to(dot_type)
    out_rows = (first_row + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    if SPREADS:
        mean, log_sum = _attend(
            queries, start + tokens, layer, table, kv_head, split * SPLIT_KEYS,
            tl.minimum(split * SPLIT_KEYS + SPLIT_KEYS, length), log2_scale, value_offset,
            KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
        )
        out_rows = out_rows * num_splits + split
        tl.store(log_sums + out_rows, log_sum, mask=tokens < count)
    else:
        mean = _attend_all(
            queries, start + tokens, layer, table, kv_head, length, log2_scale, value_offset,
            KV_HEADS, HEAD_DIM, PAGE_SIZE, SPLIT_KEYS, BLOCK_M, BLOCK_N, BLOCK_D,
        )
    pointers = output + out_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(pointers, mean.to(output.dtype.element_ty), mask=real)
# fmt: on


@triton.jit(do_not_specialize=["max_len", "num_splits", "num_tiles"])  # type: ignore[untyped-decorator]  # triton has no types
def join_kernel(
    means: tl.tensor,
    log_sums: tl.tensor,
    tiles: tl.tensor,
    output: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    num_tiles: tl.tensor,
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
    length = tl.minimum(start + token + 1, max_len)
    row = (first_row + token).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    dims = tl.arange(0, BLOCK_D)
    real = dims < HEAD_DIM
    top, total = tl.full([], float("-inf"), tl.float32), tl.zeros([], tl.float32)
    mean = tl.zeros([BLOCK_D], tl.float32)
    for split in tl.range(0, tl.cdiv(length, SPLIT_KEYS)):
        part = row * num_splits + split
        own = tl.load(means + part * HEAD_DIM + dims, mask=real, other=0.0)
        top, decay, weight = _join(top, tl.load(log_sums + part))
        total = total * decay + weight
        mean = mean * decay + own * weight
    mean = tl.div_rn(mean, tl.where(total == 0.0, 1.0, total))
    tl.store(output + row * HEAD_DIM + dims, mean.to(output.dtype.element_ty), mask=real)
