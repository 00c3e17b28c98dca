"""The Triton kernels behind window_attention.py, which says what goes in and comes out.

One program of `attention_kernel` serves one KV head of one split of one request: the window's query heads of the
group are the rows of its tile, so each key and value is read once for all of them. The softmax is the online one
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), in powers of two; splits are joined by
their log-sums (as in Dao et al., "Flash-Decoding for long-context inference", 2023).
"""

import triton
import triton.language as tl

from tllm_spec.kernels.early_launch_triton import begin


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _keys_per_split(length: tl.tensor, num_splits: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Equal shares of the true length, in whole blocks; the last splits may have none."""
    return tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits) * BLOCK_N


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
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each row's highest score, the sum of its weights relative to that, and the sum of the weighted values, over the
    keys at positions `first` to `end` of the request with the block table row `table`."""
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(first, end, BLOCK_N):
        positions_of_keys = start + tl.arange(0, BLOCK_N)
        own = positions_of_keys < end
        pages = tl.load(table + positions_of_keys // PAGE_SIZE, mask=own, other=0)
        # A pool may have more than 2**31 elements.
        slots = pages.to(tl.int64) * PAGE_SIZE + positions_of_keys % PAGE_SIZE
        places = layer + (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        # What lies beyond the length may be NaN, and zero times NaN is NaN: such values are zeros, not only masked.
        present = own[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(places, mask=present, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * log2_scale
        seen = own[None, :] & (positions_of_keys[None, :] <= positions[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may have seen nothing so far
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        values = tl.load(places + value_offset, mask=present, other=0.0).to(queries.dtype)
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(weights.to(queries.dtype), values, mixed * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, mixed


@triton.jit(do_not_specialize=["table_stride", "max_len", "num_splits"])  # type: ignore[untyped-decorator]  # triton has no types
def attention_kernel(
    q: tl.tensor,
    layer: tl.tensor,
    block_tables: tl.tensor,
    kv_lens: tl.tensor,
    output: tl.tensor,
    log_sums: tl.tensor,
    log2_scale: tl.tensor,
    request_stride: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    value_offset: tl.tensor,
    table_stride: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid (KV heads * tiles of rows, splits, requests): neighbours read the heads of the same keys."""
    begin(EARLY)
    kv_head, split = tl.program_id(0) % KV_HEADS, tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    kv_len = tl.load(kv_lens + request)
    length = tl.minimum(kv_len, max_len)
    share = _keys_per_split(length, num_splits, BLOCK_N)
    first = split * share
    end = tl.minimum(first + share, length)
    if first >= end:  # the reduction leaves such a split out
        return

    rows = tl.program_id(0) // KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    positions = kv_len - WINDOW + tokens
    real_rows = rows < WINDOW * GROUP
    real = real_rows[:, None] & (dims < HEAD_DIM)[None, :]
    q_places = q + request * request_stride + (tokens * token_stride + heads * head_stride)[:, None]
    dot_type: tl.constexpr = tl.float32 if WIDEN else layer.dtype.element_ty
    queries = tl.load(q_places + dims[None, :], mask=real, other=0.0).to(dot_type)

    top, total, mixed = _attend(
        queries, positions, layer, block_tables + request * table_stride, kv_head, first, end, log2_scale, value_offset,
        KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_rows = (request * WINDOW + tokens) * (KV_HEADS * GROUP) + heads
    if SPLITS:
        out_rows = out_rows * num_splits + split
        tl.store(log_sums + out_rows, top + tl.log2(total), mask=real_rows)
    out_places = output + out_rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_places, result.to(output.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["max_len", "num_splits"])  # type: ignore[untyped-decorator]  # triton has no types
def reduction_kernel(
    partial_outputs: tl.tensor,
    log_sums: tl.tensor,
    kv_lens: tl.tensor,
    output: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One output row (a query head of a token) a program. Reads only the splits that had keys: the others' places
    hold what an earlier launch left there."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(kv_lens + row // ROWS), max_len)
    num_used = tl.cdiv(length, _keys_per_split(length, num_splits, BLOCK_N))
    splits = tl.arange(0, BLOCK_S)
    used = splits < num_used
    dims = tl.arange(0, BLOCK_D)
    real_dims = dims < HEAD_DIM
    parts = row * num_splits + splits
    logs = tl.load(log_sums + parts, mask=used, other=float("-inf"))
    places = partial_outputs + parts[:, None] * HEAD_DIM + dims[None, :]
    outputs = tl.load(places, mask=used[:, None] & real_dims[None, :], other=0.0)
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    result = tl.sum(outputs * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(output + row * HEAD_DIM + dims, result.to(output.dtype.element_ty), mask=real_dims)
