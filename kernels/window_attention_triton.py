"""The Triton kernels of window_attention.py, which describes inputs and outputs.

One program computes one KV head of one split of one request. The rows of its tile are the window's
query heads of that KV head's group, so each key and value is read once for all of them. The softmax
is the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) in
powers of two. Splits are joined by their log-sums (as in Dao et al., "Flash-Decoding for
long-context inference", 2023).

The splits share the keys that were in the pool before. The last one adds the window's own keys from
registers, so no program reads what another program of the launch writes. Rows of a tree see by
their bits: the splits share the keys before the tree's region, and the last one adds the region.
With SPAN the splits share the keys from the first one that the window's first row sees, and the
other rows mask those that they do not see."""

import triton
import triton.language as tl

from tllm_spec.kernels.key_spans_triton import first_key
from tllm_spec.kernels.programmatic_launch_triton import launch_dependents, wait_for_previous
from tllm_spec.kernels.tree_mask_triton import is_set

_LENGTHS = ["max_len", "num_splits", "min_keys", "offset"]
# In a mixed batch these start after the rows of the contexts, at any alignment. Specializing on the
# alignment would compile more kernels.
_OFFSETS = ["kv_slots", "block_tables", "kv_lens", "num_padding", "tree_bits", "positions"]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _rotated(
    qkv: tl.tensor,
    cos_sin: tl.tensor,
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
    """Heads `heads` `[R]` of rows `tokens` `[R]` of qkv after norm and rotation, `[R, D]`."""
    dims = tl.arange(0, BLOCK_D)
    real = real_rows[:, None] & (dims < HEAD_DIM)[None, :]
    pairs = (dims + HEAD_DIM // 2) % HEAD_DIM
    pointers = qkv + ((tokens * NUM_HEADS + heads) * HEAD_DIM)[:, None]
    own = tl.load(pointers + dims[None, :], mask=real, other=0.0).to(tl.float32)
    pair = tl.load(pointers + pairs[None, :], mask=real, other=0.0).to(tl.float32)
    cosines = cos_sin + (tokens * (2 * HEAD_DIM))[:, None] + dims[None, :]
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
    """Adds keys to the state of the online softmax: each row's highest score, the sum of its
    weights relative to that, and the sum of the weighted values. scores `[R, N]`, values
    `[N, D]`."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: no key seen so far
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(top - base)
    total = total * decay + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * decay[:, None], input_precision="ieee")
    return new_top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _masked(
    scores: tl.tensor,
    bits: tl.tensor,
    offset: tl.tensor,
    window_rows: tl.tensor,
    num_own: tl.tensor,
    kv_len: tl.tensor,
    first_keys: tl.tensor,
    WINDOW: tl.constexpr,
    BLOCK_W: tl.constexpr,
    TREE: tl.constexpr,
    SPAN: tl.constexpr,
) -> tl.tensor:
    """Scores `[R, BLOCK_W]` of the window's own keys, -inf where a row does not see the key."""
    new = tl.arange(0, BLOCK_W)[None, :]
    if TREE:
        seen = (new < WINDOW) & is_set(bits, offset + tl.arange(0, BLOCK_W))
    else:
        first_own = WINDOW - tl.minimum(num_own, kv_len)  # padding may have positions below 0
        seen = (new <= window_rows[:, None]) & (new < WINDOW) & (new >= first_own)
        if SPAN:
            seen = seen & (kv_len - WINDOW + new >= first_keys[:, None])
    return tl.where(seen, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _first_keys(positions: tl.tensor, real_rows: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    return first_key(tl.load(positions, mask=real_rows, other=0).to(tl.int32), SPAN)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend(
    top: tl.tensor,
    total: tl.tensor,
    mixed: tl.tensor,
    queries: tl.tensor,
    bits: tl.tensor,
    first_keys: tl.tensor,
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
    SPAN: tl.constexpr,
    IN_TREE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state of `_add_keys` after the keys at positions `first` to `end`. All rows see them, or
    with `SPAN` those whose `first_keys` `[R]` are not above them, or, if `IN_TREE`, those whose
    bit is set; bit 0 is key `first`. table: the request's block table row."""
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(first, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        own = positions < end
        pages = tl.load(table + positions // PAGE_SIZE, mask=own, other=0)
        # A pool may have more than 2**31 elements.
        slots = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
        pointers = layer + (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        # Values beyond the length may be NaN, and 0 * NaN is NaN, so they must be loaded as zeros.
        present = own[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(pointers, mask=present, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * log2_scale
        seen = own[None, :]
        if IN_TREE:
            seen = seen & is_set(bits, positions - first)
        elif SPAN:
            seen = seen & (positions[None, :] >= first_keys[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.load(pointers + value_offset, mask=present, other=0.0).to(queries.dtype)
        top, total, mixed = _add_keys(top, total, mixed, scores, values)
    return top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend_to_pool(
    queries: tl.tensor,
    bits: tl.tensor,
    first_keys: tl.tensor,
    layer: tl.tensor,
    table: tl.tensor,
    kv_head: tl.tensor,
    first: tl.tensor,
    share: tl.tensor,
    num_old: tl.tensor,
    region_end: tl.tensor,
    is_last: tl.tensor,
    log2_scale: tl.tensor,
    value_offset: tl.tensor,
    HAS_OFFSET: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The state of `_add_keys` after a split's share of the keys in the pool: from `first` on, and
    for the last split also the keys `num_old` to `region_end` of a tree's region."""
    BLOCK_M: tl.constexpr = queries.shape[0]
    BLOCK_D: tl.constexpr = queries.shape[1]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top, total, mixed = _attend(
        top, total, mixed, queries, bits, first_keys, layer, table, kv_head, first,
        tl.minimum(first + share, num_old), log2_scale, value_offset,
        KV_HEADS, HEAD_DIM, PAGE_SIZE, SPAN, False, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if HAS_OFFSET:
        top, total, mixed = _attend(
            top, total, mixed, queries, bits, first_keys, layer, table, kv_head, num_old,
            tl.where(is_last, region_end, num_old), log2_scale, value_offset,
            KV_HEADS, HEAD_DIM, PAGE_SIZE, SPAN, True, BLOCK_N, BLOCK_D,
        )  # fmt: skip
    return top, total, mixed


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _shares(
    kv_lens: tl.tensor,
    num_padding: tl.tensor,
    request: tl.tensor,
    offset: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    SPAN: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Number of the request's keys, of the window's rows without padding, and of the keys before
    those and a tree's region; the first of the latter that a row sees, a split's share of those
    from there on in whole blocks, and the number of splits that have a share. The last split also
    has the other keys."""
    # Lengths are older than the projection (programmatic_launch.py); L1 may hold stale ones.
    kv_len, num_own = tl.load(kv_lens + request, cache_modifier=".cg"), WINDOW
    if PADDED:
        num_own = WINDOW - tl.load(num_padding + request, cache_modifier=".cg").to(tl.int32)
    num_last = num_own + offset if HAS_OFFSET else num_own
    num_old = tl.minimum(tl.maximum(kv_len - num_last, 0), max_len)
    # The first row has position num_old, and no row sees earlier keys than that one.
    num_seen = num_old - first_key(num_old, SPAN) if SPAN else num_old
    number = tl.minimum(tl.maximum((num_seen - 1) // min_keys, 1), num_splits)
    share = tl.cdiv(tl.maximum(tl.cdiv(num_seen, number), 1), BLOCK_N) * BLOCK_N
    num_used = tl.maximum(tl.cdiv(num_seen, share), 1)
    return kv_len, num_own, num_old, num_old - num_seen, share, num_used


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _window_keys(
    qkv: tl.tensor,
    cos_sin: tl.tensor,
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
    """The window's own keys after norm and rotation, and its values, `[BLOCK_W, D]`; padding rows
    are zeros. Also writes them into the pool."""
    num_heads: tl.constexpr = KV_HEADS * (GROUP + 2)
    new, dims = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    is_own = (new < WINDOW) & (new >= WINDOW - num_own)
    own = is_own[:, None] & (dims < HEAD_DIM)[None, :]
    tokens, heads = (
        request * WINDOW + new,
        KV_HEADS * GROUP + kv_head + tl.zeros([BLOCK_W], tl.int32),
    )
    keys = _rotated(
        qkv,
        cos_sin,
        norm_weights,
        eps,
        tokens,
        heads,
        is_own,
        HAS_NORM,
        num_heads,
        HEAD_DIM,
        BLOCK_D,
    )
    value_offsets = (tokens * num_heads + heads + KV_HEADS) * HEAD_DIM
    values = tl.load(qkv + value_offsets[:, None] + dims[None, :], mask=own, other=0.0)
    slots = tl.load(kv_slots + tokens, mask=is_own, other=0)
    targets = layer + ((slots * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(targets, keys, mask=own)
    tl.store(targets + value_offset, values, mask=own)
    return keys, values


# fmt: off
@triton.jit(do_not_specialize=[*_LENGTHS, "table_stride"], do_not_specialize_on_alignment=_OFFSETS)  # type: ignore[untyped-decorator]  # triton has no types
def attention_kernel(
    qkv: tl.tensor, cos_sin: tl.tensor, norm_weights: tl.tensor, eps: tl.tensor, layer: tl.tensor,
    value_offset: tl.tensor, kv_slots: tl.tensor, block_tables: tl.tensor, table_stride: tl.tensor,
    kv_lens: tl.tensor, max_len: tl.tensor, log2_scale: tl.tensor, output: tl.tensor,
    partials: tl.tensor, log_sums: tl.tensor, num_splits: tl.tensor, min_keys: tl.tensor,
    num_padding: tl.tensor, tree_bits: tl.tensor, offset: tl.tensor, positions: tl.tensor,
    SPAN: tl.constexpr, TREE: tl.constexpr, HAS_OFFSET: tl.constexpr, PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (KV heads * tiles of rows, requests, splits): adjacent programs read the heads of the
    same keys, and splits that may have no keys come last."""
    launch_dependents(PDL)
    tile, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len, num_own, num_old, first, share, num_used = _shares(
        kv_lens, num_padding, request, offset, max_len, num_splits, min_keys,
        SPAN, HAS_OFFSET, PADDED, WINDOW, BLOCK_N,
    )
    if split >= num_used:  # the reduction skips it; the first split never returns here
        return
    wait_for_previous(PDL)
    dot_type: tl.constexpr = tl.float32 if WIDEN else layer.dtype.element_ty
    kv_head, dims = tile % KV_HEADS, tl.arange(0, BLOCK_D)
    rows = tile // KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    real_rows = rows < WINDOW * GROUP
    real = real_rows[:, None] & (dims < HEAD_DIM)[None, :]
    tokens, heads = request * WINDOW + rows // GROUP, kv_head * GROUP + rows % GROUP
    queries = _rotated(
        qkv, cos_sin, norm_weights, eps, tokens, heads, real_rows,
        HAS_NORM, KV_HEADS * (GROUP + 2), HEAD_DIM, BLOCK_D,
    ).to(dot_type)
    bits = tl.load(tree_bits + tokens, mask=real_rows, other=0) if TREE else None
    first_keys = _first_keys(positions + tokens, real_rows, SPAN) if SPAN else None
    is_last = split == num_used - 1
    top, total, mixed = _attend_to_pool(
        queries, bits, first_keys, layer, block_tables + request * table_stride, kv_head,
        first + split * share, share, num_old, tl.minimum(num_old + offset, max_len), is_last,
        log2_scale, value_offset, HAS_OFFSET, KV_HEADS, HEAD_DIM, PAGE_SIZE, SPAN, BLOCK_N,
    )
    if is_last:
        keys, values = _window_keys(
            qkv, cos_sin, norm_weights, eps, layer, value_offset, kv_slots, num_own, request,
            kv_head, HAS_NORM, WINDOW, GROUP, KV_HEADS, HEAD_DIM, BLOCK_W, BLOCK_D,
        )
        scores = _masked(
            tl.dot(queries, tl.trans(keys.to(dot_type)), input_precision="ieee") * log2_scale,
            bits, offset, rows // GROUP, num_own, kv_len, first_keys, WINDOW, BLOCK_W, TREE, SPAN,
        )
        top, total, mixed = _add_keys(top, total, mixed, scores, values.to(dot_type))
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_rows = tokens * (KV_HEADS * GROUP) + heads
    if SPLITS and num_used > 1:
        out_rows = out_rows * num_splits + split
        tl.store(log_sums + out_rows, top + tl.log2(total), mask=real_rows)
        tl.store(partials + out_rows[:, None] * HEAD_DIM + dims[None, :], result, mask=real)
    else:
        pointers = output + out_rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pointers, result.to(output.dtype.element_ty), mask=real)
# fmt: on


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_OFFSETS[2:])  # type: ignore[untyped-decorator]  # triton has no types
def reduction_kernel(
    partial_outputs: tl.tensor,
    log_sums: tl.tensor,
    kv_lens: tl.tensor,
    output: tl.tensor,
    max_len: tl.tensor,
    num_splits: tl.tensor,
    min_keys: tl.tensor,
    num_padding: tl.tensor,
    offset: tl.tensor,
    SPAN: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    PADDED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Joins the splits of `ROWS` output rows (query heads of a token) per program. Reads only the
    splits that had keys: the others hold results of an earlier launch."""
    launch_dependents(PDL)
    first = tl.program_id(0) * ROWS
    request = first // (WINDOW * HEADS)
    _, _, _, _, _, num_used = _shares(
        kv_lens, num_padding, request, offset, max_len, num_splits, min_keys,
        SPAN, HAS_OFFSET, PADDED, WINDOW, BLOCK_N,
    )  # fmt: skip
    wait_for_previous(PDL)
    if num_used == 1:  # the attention kernel wrote the output
        return
    rows, splits, dims = first + tl.arange(0, ROWS), tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    used, real_dims = (splits < num_used)[None, :], (dims < HEAD_DIM)[None, :]
    parts = rows[:, None] * num_splits + splits[None, :]
    logs = tl.load(log_sums + parts, mask=used, other=float("-inf"))
    pointers = partial_outputs + parts[:, :, None] * HEAD_DIM + dims[None, None, :]
    outputs = tl.load(pointers, mask=used[:, :, None] & real_dims[:, None, :], other=0.0)
    top = tl.max(logs, 1)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(weights, 1)
    result = tl.sum(outputs * weights[:, :, None], 1) / tl.where(total == 0.0, 1.0, total)[:, None]
    targets = output + rows[:, None] * HEAD_DIM + dims[None, :]
    tl.store(targets, result.to(output.dtype.element_ty), mask=real_dims)
