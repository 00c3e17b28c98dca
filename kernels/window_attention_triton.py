"""The Triton kernels behind window_attention.py, which says what goes in and comes out.

One program serves one KV head of one split of one request: the window's query heads of the group
are the rows of its tile, so each key and value is read once for all of them. The softmax is the
online one (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), in powers of
two; splits are joined by their log-sums (as in Dao et al., "Flash-Decoding for long-context
inference", 2023).

The splits share the keys that were in the pool before; the last of them adds the window's own from
its registers, so no program reads what another of the launch has written."""

import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch_triton import announce, wait

_LENGTHS = ["max_len", "num_splits", "min_keys"]
# Beside contexts these begin anywhere behind the contexts' rows: each alignment would be one more
# kernel to compile.
_PLACES = ["kv_slots", "block_tables", "kv_lens", "num_padding"]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _rotated(
    qkv: tl.tensor,
    turns: tl.tensor,
    norm_weights: tl.tensor,
    eps: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    real_rows: tl.tensor,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tl.tensor:
    """`[R, D]`: the heads `heads` `[R]` of the rows `tokens` `[R]` of qkv, normed and turned."""
    dims = tl.arange(0, BLOCK_D)
    real = real_rows[:, None] & (dims < HEAD_DIM)[None, :]
    pairs = (dims + HEAD_DIM // 2) % HEAD_DIM
    places = qkv + ((tokens * NUM_HEADS + heads) * HEAD_DIM)[:, None]
    own = tl.load(places + dims[None, :], mask=real, other=0.0).to(tl.float32)
    pair = tl.load(places + pairs[None, :], mask=real, other=0.0).to(tl.float32)
    cosines = turns + (tokens * (2 * HEAD_DIM))[:, None] + dims[None, :]
    cos = tl.load(cosines, mask=real, other=0.0).to(tl.float32)
    sin = tl.load(cosines + HEAD_DIM, mask=real, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse_rms = tl.rsqrt(tl.sum(own * own, 1, keep_dims=True) / HEAD_DIM + eps)
        weights = norm_weights + (heads * HEAD_DIM)[:, None]
        own *= inverse_rms * tl.load(weights + dims[None, :], mask=real, other=0.0).to(tl.float32)
        pair *= inverse_rms * tl.load(weights + pairs[None, :], mask=real, other=0.0).to(tl.float32)
    return (own * cos + pair * sin).to(qkv.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _add_keys(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, scores: tl.tensor, values: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Each row's highest score, the sum of its weights relative to that, and the sum of the
    weighted values, with some
    more keys: scores `[R, N]`, values `[N, D]`."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may have seen nothing so far
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return new_top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend(
    queries: tl.tensor,
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
    """What `_add_keys` gives for the keys at positions `first` to `end`, which all rows see, of the
    request with the block table row `table`."""
    dims = tl.arange(0, BLOCK_D)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(first, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        own = positions < end
        pages = tl.load(table + positions // PAGE_SIZE, mask=own, other=0)
        # A pool may have more than 2**31 elements.
        slots = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        places = layer + (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        # What lies beyond the length may be NaN, and zero times NaN is NaN: such values are zeros,
        # not only masked.
        present = own[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(places, mask=present, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * log2_scale
        scores = tl.where(own[None, :], scores, float("-inf"))
        values = tl.load(places + value_offset, mask=present, other=0.0).to(queries.dtype)
        top, total, mixed = _add_keys(top, total, mixed, scores, values)
    return top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _num_own(
    num_padding: tl.tensor, request: tl.tensor, WINDOW: tl.constexpr, PADDED: tl.constexpr
) -> tl.tensor:
    """The window's rows without those that are nobody's."""
    return (
        WINDOW - tl.load(num_padding + request, cache_modifier=".cg").to(tl.int32)
        if PADDED
        else WINDOW
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _shares(
    kv_len: tl.tensor,
    num_own: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many keys were in the pool before, a split's share of them in whole blocks, and how many
    splits have one; the last of these has the window, too."""
    num_old = tl.minimum(tl.maximum(kv_len - num_own, 0), max_len)
    number = tl.minimum(tl.maximum((num_old - 1) // min_keys, 1), num_splits)
    share = tl.cdiv(tl.maximum(tl.cdiv(num_old, number), 1), BLOCK_N) * BLOCK_N
    return num_old, share, tl.maximum(tl.cdiv(num_old, share), 1)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _window_keys(
    qkv: tl.tensor,
    turns: tl.tensor,
    norm_weights: tl.tensor,
    eps: tl.tensor,
    layer: tl.tensor,
    value_offset: tl.tensor,
    kv_slots: tl.tensor,
    num_own: tl.tensor,
    request: tl.tensor,
    kv_head: tl.tensor,
    HAS_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The window's own keys, turned, and its values, `[BLOCK_W, D]`; they go into the pool, too.
    Zeros are nobody's."""
    num_heads: tl.constexpr = KV_HEADS * (GROUP + 2)
    new, dims = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    own_rows = (new < WINDOW) & (new >= WINDOW - num_own)
    own = own_rows[:, None] & (dims < HEAD_DIM)[None, :]
    tokens, heads = (
        request * WINDOW + new,
        KV_HEADS * GROUP + kv_head + tl.zeros([BLOCK_W], tl.int32),
    )
    keys = _rotated(
        qkv,
        turns,
        norm_weights,
        eps,
        tokens,
        heads,
        own_rows,
        HAS_NORM,
        num_heads,
        HEAD_DIM,
        BLOCK_D,
    )
    value_places = (tokens * num_heads + heads + KV_HEADS) * HEAD_DIM
    values = tl.load(qkv + value_places[:, None] + dims[None, :], mask=own, other=0.0)
    slots = tl.load(kv_slots + tokens, mask=own_rows, other=0)
    targets = layer + ((slots * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(targets, keys, mask=own)
    tl.store(targets + value_offset, values, mask=own)
    return keys, values


# fmt: off
@triton.jit(do_not_specialize=[*_LENGTHS, "table_stride"], do_not_specialize_on_alignment=_PLACES)  # type: ignore[untyped-decorator]  # triton has no types
def attention_kernel(
    qkv: tl.tensor, turns: tl.tensor, norm_weights: tl.tensor, eps: tl.tensor,
    layer: tl.tensor, value_offset: tl.tensor, kv_slots: tl.tensor,
    block_tables: tl.tensor, table_stride: tl.tensor, kv_lens: tl.tensor, max_len: tl.tensor,
    log2_scale: tl.tensor, output: tl.tensor, partials: tl.tensor, log_sums: tl.tensor,
    num_splits: tl.tensor, min_keys: tl.tensor, num_padding: tl.tensor,
    PADDED: tl.constexpr, HAS_NORM: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """Grid (KV heads * tiles of rows, requests, splits): neighbours read the heads of the same
    keys, and splits that may have none come last."""
    announce(EARLY)
    tile, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # Lengths are older than the projection (programmatic_launch.py), and there before it ends: in
    # the L2 cache.
    kv_len, num_own = tl.load(kv_lens + request, cache_modifier=".cg"), _num_own(num_padding, request, WINDOW, PADDED)
    num_old, share, num_used = _shares(kv_len, num_own, max_len, num_splits, min_keys, BLOCK_N)
    if split >= num_used:  # the reduction leaves such a split out; the first one always goes on, and waits
        return
    wait(EARLY)

    dot_type: tl.constexpr = tl.float32 if WIDEN else layer.dtype.element_ty
    kv_head = tile % KV_HEADS
    dims = tl.arange(0, BLOCK_D)
    rows = tile // KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    real_rows = rows < WINDOW * GROUP
    real = real_rows[:, None] & (dims < HEAD_DIM)[None, :]
    tokens, heads = request * WINDOW + rows // GROUP, kv_head * GROUP + rows % GROUP
    queries = _rotated(
        qkv, turns, norm_weights, eps, tokens, heads, real_rows, HAS_NORM, KV_HEADS * (GROUP + 2), HEAD_DIM, BLOCK_D
    ).to(dot_type)
    first = split * share
    top, total, mixed = _attend(
        queries, layer, block_tables + request * table_stride, kv_head, first, tl.minimum(first + share, num_old),
        log2_scale, value_offset, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )
    if split == num_used - 1:
        keys, values = _window_keys(
            qkv, turns, norm_weights, eps, layer, value_offset, kv_slots, num_own, request, kv_head,
            HAS_NORM, WINDOW, GROUP, KV_HEADS, HEAD_DIM, BLOCK_W, BLOCK_D,
        )
        scores = tl.dot(queries, tl.trans(keys.to(dot_type)), input_precision="ieee") * log2_scale
        new = tl.arange(0, BLOCK_W)[None, :]
        # Padding may begin before position 0.
        seen = (new <= (rows // GROUP)[:, None]) & (new < WINDOW) & (new >= WINDOW - tl.minimum(num_own, kv_len))
        scores = tl.where(seen, scores, float("-inf"))
        top, total, mixed = _add_keys(top, total, mixed, scores, values.to(dot_type))
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]

    out_rows = tokens * (KV_HEADS * GROUP) + heads
    if SPLITS and num_used > 1:
        out_rows = out_rows * num_splits + split
        tl.store(log_sums + out_rows, top + tl.log2(total), mask=real_rows)
        tl.store(partials + out_rows[:, None] * HEAD_DIM + dims[None, :], result, mask=real)
    else:
        places = output + out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(places, result.to(output.dtype.element_ty), mask=real)
# fmt: on


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_PLACES[2:])  # type: ignore[untyped-decorator]  # triton has no types
def reduction_kernel(
    partial_outputs: tl.tensor,
    log_sums: tl.tensor,
    kv_lens: tl.tensor,
    output: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    num_padding: tl.tensor,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """`ROWS` output rows (query heads of a token) a program, of a request whose keys were split.
    Reads only the splits
    that had keys: the others' places hold what an earlier launch left there."""
    announce(EARLY)
    first = tl.program_id(0) * ROWS
    request = first // (WINDOW * HEADS)
    kv_len, num_own = (
        tl.load(kv_lens + request, cache_modifier=".cg"),
        _num_own(num_padding, request, WINDOW, PADDED),
    )
    _, _, num_used = _shares(kv_len, num_own, max_len, num_splits, min_keys, BLOCK_N)
    wait(EARLY)
    if num_used == 1:  # the output is there
        return
    rows, splits, dims = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    used, real_dims = (splits < num_used)[None, :], (dims < HEAD_DIM)[None, :]
    parts = rows[:, None] * num_splits + splits[None, :]
    logs = tl.load(log_sums + parts, mask=used, other=float("-inf"))
    places = partial_outputs + parts[:, :, None] * HEAD_DIM + dims[None, None, :]
    outputs = tl.load(places, mask=used[:, :, None] & real_dims[:, None, :], other=0.0)
    top = tl.max(logs, 1)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    result = tl.sum(outputs * weights[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    targets = output + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(targets, result.to(output.dtype.element_ty), mask=real_dims)
