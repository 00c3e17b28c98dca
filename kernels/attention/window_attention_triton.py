"""The Triton kernels of window_attention.py, which describes inputs and outputs.

One program computes one KV head of one split of one request. The rows of its tile are the window's
query heads of that KV head's group, so each key and value is read once for all of them. The softmax
is the online softmax (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) in
powers of two. Splits are joined by their log-sums (as in Dao et al., "Flash-Decoding for
long-context inference", 2023).

The splits share the keys that were in the pool before, and a tree's region. The program of the
last one first writes the window's own keys there and then attends to them, too; no program reads
what another one of the launch writes. Keys are added in blocks from multiples of BLOCK_N on, so the
order of a row's sums does not depend on where its window begins. Rows of a tree see by their bits.
The last split also has the sink, one more score without a value.
With SPAN the splits share the keys from the block on that has the first one that the window's first
row sees, and all rows mask those that they do not see.

The windows have WINDOW rows each, or, if RAGGED, as many as `offsets` say, at most WINDOW."""

import triton
import triton.language as tl

from tllm_spec.kernels.attention.attention_sinks import sink_scores
from tllm_spec.kernels.attention.kv_codes import encoded_block
from tllm_spec.kernels.attention.visible_keys import first_key, is_set
from tllm_spec.kernels.attention.window_splits import LENGTHS, OFFSETS, add_paged_keys, shares
from tllm_spec.kernels.launch import launch_dependents, wait_for_previous

_OFFSETS = [*OFFSETS, "kv_slots", "block_tables", "tree_bits", "positions"]


@triton.jit
def _rotated(
    qkv: tl.tensor, cos_sin: tl.tensor, norm_weights: tl.tensor, eps: tl.tensor, tokens: tl.tensor,
    heads: tl.tensor, real_rows: tl.tensor, HAS_NORM: tl.constexpr, NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
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


@triton.jit
def _first_keys(positions: tl.tensor, real_rows: tl.tensor, SPAN: tl.constexpr) -> tl.tensor:
    return first_key(tl.load(positions, mask=real_rows, other=0).to(tl.int32), SPAN)


@triton.jit
def _attend(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, queries: tl.tensor, rows: tl.tensor,
    pool: tl.tensor, first: tl.tensor, end: tl.tensor, lowest: tl.tensor, num_old: tl.tensor,
    SPAN: tl.constexpr, IN_TREE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state of `add_keys` after the keys at positions `first` to `end`. rows: `ends`, `bits`
    and `first_keys` `[R]`. Rows see keys below their `ends`, with `SPAN` from their `first_keys`
    on. If `IN_TREE`, they see those from `num_old` on whose bit is set; bit 0 is key `num_old`.
    Keys below `lowest` are not read."""
    ends, bits, first_keys = rows
    for start in tl.range(first, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        own = positions < end
        if SPAN:
            own = own & (positions >= lowest)
        seen = positions[None, :] < ends[:, None]
        if SPAN:
            seen = seen & (positions[None, :] >= first_keys[:, None])
        if IN_TREE:
            in_bits = is_set(bits, tl.maximum(positions - num_old, 0))
            seen = tl.where((positions < num_old)[None, :], seen, in_bits)
        seen = seen & own[None, :]
        top, total, mixed = add_paged_keys(top, total, mixed, queries, pool, positions, own, seen)
    return top, total, mixed


@triton.jit
def _attend_to_split(
    queries: tl.tensor, sinks: tl.tensor, heads: tl.tensor, rows: tl.tensor, pool: tl.tensor,
    first: tl.tensor, end: tl.tensor, lowest: tl.tensor, num_old: tl.tensor, is_last: tl.tensor,
    SPAN: tl.constexpr, TREE: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state of `add_keys` after a split's keys, `first` to `end`, and the last one's sink."""
    top = tl.full([queries.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries.shape[0]], tl.float32)
    mixed = tl.zeros(queries.shape, tl.float32)
    if sinks is not None:
        top = tl.where(is_last, sink_scores(sinks, heads), top)
        total = tl.where(is_last, 1.0, total)
    if TREE:
        common = tl.minimum(end, num_old // BLOCK_N * BLOCK_N)  # in blocks that all rows see whole
        top, total, mixed = _attend(
            top, total, mixed, queries, rows, pool, first, common, lowest, num_old,
            SPAN, False, BLOCK_N,
        )  # fmt: skip
        first = tl.maximum(first, common)
    top, total, mixed = _attend(
        top, total, mixed, queries, rows, pool, first, end, lowest, num_old, SPAN, TREE, BLOCK_N
    )
    return top, total, mixed


@triton.jit
def _write_window(
    qkv: tl.tensor, cos_sin: tl.tensor, norm_weights: tl.tensor, eps: tl.tensor, layer: tl.tensor,
    value_offset: tl.tensor, kv_slots: tl.tensor, num_own: tl.tensor, first_row: tl.tensor,
    width: tl.tensor, kv_head: tl.tensor, key_inverse: tl.tensor, value_inverse: tl.tensor,
    NORMS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the keys of the window's `width` rows, after norm and rotation, and their values, if
    they are normed after a norm without weights, but not those of padding rows, to the pool."""
    num_heads: tl.constexpr = KV_HEADS * (GROUP + 2)
    new, dims = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_D)
    is_own = (new < width) & (new >= width - num_own)
    own = is_own[:, None] & (dims < HEAD_DIM)[None, :]
    tokens, heads = first_row + new, KV_HEADS * GROUP + kv_head + tl.zeros([BLOCK_W], tl.int32)
    keys = _rotated(
        qkv, cos_sin, norm_weights, eps, tokens, heads, is_own, NORMS > 0, num_heads, HEAD_DIM,
        BLOCK_D,
    )  # fmt: skip
    value_offsets = (tokens * num_heads + heads + KV_HEADS) * HEAD_DIM
    values = tl.load(qkv + value_offsets[:, None] + dims[None, :], mask=own, other=0.0)
    if NORMS > 1:
        wide = values.to(tl.float32)
        mean_square = tl.sum(wide * wide, 1, keep_dims=True) / HEAD_DIM
        values = (wide * tl.rsqrt(mean_square + eps)).to(values.dtype)
    slots = tl.load(kv_slots + tokens, mask=is_own, other=0)
    keys = encoded_block(keys, key_inverse, layer.dtype.element_ty)
    values = encoded_block(values, value_inverse, layer.dtype.element_ty)
    targets = layer + ((slots * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(targets, keys, mask=own)
    tl.store(targets + value_offset, values, mask=own)


@triton.jit
def _store(
    top: tl.tensor, total: tl.tensor, mixed: tl.tensor, rows: tl.tensor, dims: tl.tensor,
    real_rows: tl.tensor, split: tl.tensor, num_splits: tl.tensor, num_used: tl.tensor,
    output: tl.tensor, partials: tl.tensor, log_sums: tl.tensor, value_scale: tl.tensor,
    layer: tl.tensor, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Writes the softmax of a split to the output's rows, or, if others follow, to their partial
    results."""
    real = real_rows[:, None] & (dims < HEAD_DIM)[None, :]
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    if layer.dtype.element_ty == tl.float8e4nv:
        result *= value_scale
    if SPLITS and num_used > 1:
        rows = rows * num_splits + split
        tl.store(log_sums + rows, top + tl.log2(total), mask=real_rows)
        tl.store(partials + rows[:, None] * HEAD_DIM + dims[None, :], result, mask=real)
    else:
        pointers = output + rows[:, None] * HEAD_DIM + dims[None, :]
        tl.store(pointers, result.to(output.dtype.element_ty), mask=real)


# fmt: off
@triton.jit(do_not_specialize=[*LENGTHS, "table_stride"], do_not_specialize_on_alignment=_OFFSETS)
def attention_kernel(
    qkv: tl.tensor, cos_sin: tl.tensor, norm_weights: tl.tensor, eps: tl.tensor, sinks: tl.tensor,
    layer: tl.tensor, value_offset: tl.tensor, kv_slots: tl.tensor, block_tables: tl.tensor,
    table_stride: tl.tensor, kv_lens: tl.tensor, max_len: tl.tensor, log2_scale: tl.tensor,
    output: tl.tensor, partials: tl.tensor, log_sums: tl.tensor, num_splits: tl.tensor,
    min_keys: tl.tensor, num_padding: tl.tensor, tree_bits: tl.tensor, offset: tl.tensor,
    positions: tl.tensor, offsets: tl.tensor, key_inverse: tl.tensor, value_inverse: tl.tensor,
    value_scale: tl.tensor, SPAN: tl.constexpr, TREE: tl.constexpr, HAS_OFFSET: tl.constexpr,
    PADDED: tl.constexpr, RAGGED: tl.constexpr, NORMS: tl.constexpr, WRITES: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_D: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Grid (KV heads * tiles of rows, requests, splits): adjacent programs read the heads of the
    same keys, and splits that may have no keys come last. NORMS: 1 of q and k, 2 of v, too."""
    launch_dependents(PDL)
    tile, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len, num_own, num_old, first, share, num_used = shares(
        kv_lens, num_padding, offsets, request, offset, max_len, num_splits, min_keys,
        SPAN, HAS_OFFSET, PADDED, RAGGED, WINDOW, BLOCK_N,
    )
    if split >= num_used:  # the reduction skips it; the first split never returns here
        return
    wait_for_previous(PDL)
    if RAGGED and tile // KV_HEADS * BLOCK_M >= num_own * GROUP:  # a tile without rows
        return
    dot_type: tl.constexpr = tl.float32 if WIDEN else qkv.dtype.element_ty
    kv_head, dims, width = tile % KV_HEADS, tl.arange(0, BLOCK_D), num_own if RAGGED else WINDOW
    rows = tile // KV_HEADS * BLOCK_M + tl.arange(0, BLOCK_M)
    first_row = tl.load(offsets + request) if RAGGED else request * WINDOW
    real_rows, table = rows < width * GROUP, block_tables + request * table_stride
    tokens, heads = first_row + rows // GROUP, kv_head * GROUP + rows % GROUP
    queries = _rotated(
        qkv, cos_sin, norm_weights, eps, tokens, heads, real_rows,
        NORMS > 0, KV_HEADS * (GROUP + 2 if WRITES else GROUP), HEAD_DIM, BLOCK_D,
    ).to(dot_type)
    bits = tl.load(tree_bits + tokens, mask=real_rows, other=0) if TREE else 0
    first_keys = _first_keys(positions + tokens, real_rows, SPAN) if SPAN else 0
    is_last, lowest = split == num_used - 1, first_key(num_old, SPAN) if SPAN else 0
    first, end = first + split * share, tl.minimum(first + (split + 1) * share, num_old)
    # Rows of trees see by their bits, and no key after the end.
    ends = tl.zeros([BLOCK_M], tl.int32) + max_len if TREE else kv_len - width + rows // GROUP + 1
    if is_last:
        if WRITES:
            _write_window(
                qkv, cos_sin, norm_weights, eps, layer, value_offset, kv_slots, num_own, first_row,
                width, kv_head, key_inverse, value_inverse, NORMS, GROUP, KV_HEADS, HEAD_DIM,
                BLOCK_W, BLOCK_D,
            )
            tl.debug_barrier()  # all threads of the program see what was written
        end = tl.minimum(kv_len, max_len)
    pool = (layer, value_offset, table, kv_head, log2_scale, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    top, total, mixed = _attend_to_split(
        queries, sinks, heads, (ends, bits, first_keys), pool, first, end, lowest, num_old, is_last,
        SPAN, TREE, BLOCK_N,
    )
    _store(
        top, total, mixed, tokens * (KV_HEADS * GROUP) + heads, dims, real_rows, split,
        num_splits, num_used, output, partials, log_sums, value_scale, layer, SPLITS, HEAD_DIM,
    )
# fmt: on
