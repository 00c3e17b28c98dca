"""The Triton kernels of latent_attention.py, which describes inputs and outputs.

One program computes a tile of query rows (heads of the window's tokens) over one split of one
request's keys. A latent is loaded once, as key and as value. The softmax is the online softmax
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018) in powers of two; splits
are joined by their log-sums.

The windows have WINDOW tokens each, or, if RAGGED, as many as `offsets` say, at most WINDOW."""

import triton
import triton.language as tl

from tllm_spec.kernels.attention.kv_codes import widened
from tllm_spec.kernels.attention.visible_keys import is_set
from tllm_spec.kernels.attention.window_splits import add_keys
from tllm_spec.kernels.launch import (
    begin,
    launch_dependents,
    wait_for_previous,
)

_LENGTHS = ["max_len", "num_tokens", "num_splits", "table_stride", "tree_len"]
# In a mixed batch these start after the rows of the contexts, at any alignment. Specializing on the
# alignment would compile more kernels.
_OFFSETS = ["block_tables", "kv_lens", "tree_bits", "offsets"]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _share(
    kv_len: tl.tensor, max_len: tl.tensor, num_splits: tl.tensor, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Number of keys, a split's share of them in whole blocks, and the number of splits that have a
    share."""
    num_keys = tl.minimum(kv_len, max_len)
    share = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_N), 1) * BLOCK_N
    return num_keys, share, tl.maximum(tl.cdiv(num_keys, share), 1)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def load_queries(
    q_latent: tl.tensor, q: tl.tensor, latent_rows: tl.tensor, rows: tl.tensor,
    real_rows: tl.tensor, RANK: tl.constexpr, ROPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The queries' absorbed parts `[M, R]` at rows `latent_rows` of `[H, B * W]`, and their rotated
    parts `[M, P]` at rows `rows` of `[B * W, H]`."""
    ranks, ropes = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    real = real_rows[:, None] & (ranks < RANK)[None, :]
    absorbed = tl.load(q_latent + latent_rows[:, None] * RANK + ranks[None, :], mask=real, other=0)
    pointers = q + (rows * HEAD_DIM + HEAD_DIM - ROPE)[:, None] + ropes[None, :]
    real_ropes = real_rows[:, None] & (ropes < ROPE)[None, :]
    return absorbed, tl.load(pointers, mask=real_ropes, other=0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def latent_scores(
    queries: tl.tensor, pool: tl.tensor, pages: tl.tensor, keys: tl.tensor, own: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The latents `[N, R]` of the keys at indices `keys` `[N]`, which are in `pages` `[N]`, and the
    queries' scores `[M, N]`. What lies beyond the length may be NaN, and 0 * NaN is NaN: keys that
    are not `own` are loaded as zeros. queries: absorbed and rotated parts; pool: a layer, the
    request's block table row, the factor of scores, RANK, ROPE and tokens of a page."""
    absorbed, rotated = queries
    layer, _, log2_scale, RANK, ROPE, PAGE_SIZE = pool
    ranks, ropes = tl.arange(0, absorbed.shape[1]), tl.arange(0, rotated.shape[1])
    # A pool may have more than 2**31 elements.
    slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    entries = layer + slots[:, None] * (RANK + ROPE)
    real = own[:, None] & (ranks < RANK)[None, :]
    latents = tl.load(entries + ranks[None, :], mask=real, other=0.0)
    latents = widened(latents, absorbed.dtype)
    real_ropes = own[:, None] & (ropes < ROPE)[None, :]
    shared = tl.load(entries + RANK + ropes[None, :], mask=real_ropes, other=0.0)
    scores = tl.dot(absorbed, tl.trans(latents), input_precision="ieee")
    shared = tl.trans(widened(shared, absorbed.dtype))
    return latents, tl.dot(rotated, shared, scores, input_precision="ieee") * log2_scale


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _seen(
    keys: tl.tensor, positions: tl.tensor, bits: tl.tensor, region: tl.tensor, TREE: tl.constexpr
) -> tl.tensor:
    """Which keys each row sees, `[M, N]`: those up to its position; of a tree, those before
    `region` and, from there on, those whose bit is set."""
    if TREE:
        return (keys < region)[None, :] | is_set(bits, tl.maximum(keys - region, 0))
    else:  # noqa: RET505 - Triton compiles what follows a return
        return keys[None, :] <= positions[:, None]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend(
    queries: tl.tensor, positions: tl.tensor, bits: tl.tensor, region: tl.tensor, pool: tl.tensor,
    first: tl.tensor, end: tl.tensor, BLOCK_N: tl.constexpr, TREE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Reads the keys `first` to `end`. Returns each row's highest score, the sum of its weights
    relative to that, and the sum of the weighted latents."""
    top = tl.full([queries[0].shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([queries[0].shape[0]], tl.float32)
    mixed = tl.zeros(queries[0].shape, tl.float32)
    columns, table, PAGE_SIZE = tl.arange(0, BLOCK_N), pool[1], pool[5]
    pages = tl.load(table + (first + columns) // PAGE_SIZE, mask=first + columns < end, other=0)
    for start in tl.range(first, end, BLOCK_N):
        keys = start + columns
        own, later = keys < end, keys + BLOCK_N
        # Loaded one block ahead: the loads of latents, which Triton pipelines, wait for no load.
        next_pages = tl.load(table + later // PAGE_SIZE, mask=later < end, other=0)
        latents, scores = latent_scores(queries, pool, pages, keys, own)
        seen = own[None, :] & _seen(keys, positions, bits, region, TREE)
        scores = tl.where(seen, scores, float("-inf"))
        top, total, mixed = add_keys(top, total, mixed, scores, latents)
        pages = next_pages
    return top, total, mixed


# fmt: off
@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_OFFSETS)  # type: ignore[untyped-decorator]  # triton has no types
def attention_kernel(
    q_latent: tl.tensor, q: tl.tensor, layer: tl.tensor, block_tables: tl.tensor,
    table_stride: tl.tensor, kv_lens: tl.tensor, max_len: tl.tensor, num_tokens: tl.tensor,
    log2_scale: tl.tensor, output: tl.tensor, partials: tl.tensor, log_sums: tl.tensor,
    num_splits: tl.tensor, tree_bits: tl.tensor, tree_len: tl.tensor, offsets: tl.tensor,
    latent_scale: tl.tensor, TREE: tl.constexpr, RAGGED: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """Grid (tiles of rows, requests, splits): adjacent programs read the same keys."""
    begin(PDL)
    tile, request, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_len = tl.load(kv_lens + request)
    num_keys, share, num_used = _share(kv_len, max_len, num_splits, BLOCK_N)
    if split >= num_used:  # the reduction skips it; the first split never returns here
        return
    width = tl.load(offsets + request + 1) - tl.load(offsets + request) if RAGGED else WINDOW
    if RAGGED and tile * BLOCK_M >= width * HEADS:  # a tile without rows
        return
    dot_type: tl.constexpr = tl.float32 if WIDEN else q.dtype.element_ty
    tile_rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real_rows = tile_rows < width * HEADS
    new, heads = tile_rows // HEADS, tile_rows % HEADS
    first_token = tl.load(offsets + request) if RAGGED else request * WINDOW
    tokens = (first_token + new).to(tl.int64)
    latent_rows, rows = heads * num_tokens + tokens, tokens * HEADS + heads
    absorbed, rotated = load_queries(
        q_latent, q, latent_rows, rows, real_rows, RANK, ROPE, HEAD_DIM, BLOCK_R, BLOCK_P,
    )
    bits = tl.load(tree_bits + tokens, mask=real_rows, other=0) if TREE else None
    region = kv_len - (width if RAGGED else tree_len)
    first = split * share
    pool = (layer, block_tables + request * table_stride, log2_scale, RANK, ROPE, PAGE_SIZE)
    top, total, mixed = _attend(
        (absorbed.to(dot_type), rotated.to(dot_type)), kv_len - width + new, bits, region, pool,
        first, tl.minimum(first + share, num_keys), BLOCK_N, TREE,
    )
    result = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    if layer.dtype.element_ty == tl.float8e4nv:
        result *= latent_scale
    ranks = tl.arange(0, BLOCK_R)
    real = real_rows[:, None] & (ranks < RANK)[None, :]
    if SPLITS and num_used > 1:
        parts = rows * num_splits + split
        tl.store(log_sums + parts, top + tl.log2(total), mask=real_rows)
        tl.store(partials + parts[:, None] * RANK + ranks[None, :], result, mask=real)
    else:
        targets = output + latent_rows[:, None] * RANK + ranks[None, :]
        tl.store(targets, result.to(output.dtype.element_ty), mask=real)
# fmt: on


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_OFFSETS[1:])  # type: ignore[untyped-decorator]  # triton has no types
def reduction_kernel(
    partials: tl.tensor,
    log_sums: tl.tensor,
    kv_lens: tl.tensor,
    max_len: tl.tensor,
    num_tokens: tl.tensor,
    output: tl.tensor,
    num_splits: tl.tensor,
    offsets: tl.tensor,
    RAGGED: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows of whole windows, parts of the latent). Reads only the splits that had keys: the
    others hold results of an earlier launch."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    request = token // WINDOW
    kv_len = tl.load(kv_lens + request)
    _, _, num_used = _share(kv_len, max_len, num_splits, BLOCK_N)
    if num_used == 1:  # the attention kernel wrote the output
        return
    if RAGGED:
        first_token = tl.load(offsets + request)
        token += first_token - request * WINDOW
        row = token * HEADS + head
        if token >= tl.load(offsets + request + 1):
            return
    splits = tl.arange(0, BLOCK_S)
    ranks = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    used, real = splits < num_used, ranks < RANK
    parts = row * num_splits + splits
    logs = tl.load(log_sums + parts, mask=used, other=float("-inf"))
    pointers = partials + parts[:, None] * RANK + ranks[None, :]
    outputs = tl.load(pointers, mask=used[:, None] & real[None, :], other=0.0)
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    result = tl.sum(outputs * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    target = output + (head * num_tokens + token) * RANK + ranks
    tl.store(target, result.to(output.dtype.element_ty), mask=real)
