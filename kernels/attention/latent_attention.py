"""Paged attention of generation windows over MLA's latents, in the absorbed form (arXiv 2405.04434,
section 2.1.2): the key projection is multiplied into the queries before, the value projection into
the result after. So all query heads of all tokens of a window attend to one shared vector per key,
which is key and value, and each page is read once for a tile of query rows.

Lengths and block tables are read on the device, and the launch depends on shapes only, so a
captured launch can be replayed with other lengths. Each split of the keys takes an equal share of
the request's actual length.

`latent_attention` is a Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

import math
from dataclasses import dataclass, replace

import torch

from tllm_spec.kernels.attention.kv_codes import CODES, UNSCALED, KVScales, widened
from tllm_spec.kernels.attention.visible_keys import TreeMask, hidden_keys, is_set
from tllm_spec.kernels.attention.window_splits import WindowWorkspace, add_keys, power_of_two
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import (
    HOPPER_BYTES,
    begin,
    launch_dependents,
    programmatic_launch,
    shared_memory_bytes,
    wait_for_previous,
)
from tllm_spec.kernels.slots.round_rows import RoundRows

# Each split has at least so many keys.
MIN_KEYS_PER_SPLIT = 64
MAX_SPLITS = 64
# Query rows whose partial results fit the workspace; with R = 512 it takes 32 MiB.
MAX_PARTIAL_ROWS = 1 << 14
# Elements that a program of the reduction adds up, over splits and latent.
REDUCED_ELEMENTS = 8192


@dataclass(frozen=True)
class LatentTables:
    """Positions of B windows in the KV pool, T rows in all; all tensors on the device. The latents
    of the windows themselves are in the pool."""

    rows: RoundRows
    """The windows' rows."""
    block_tables: torch.Tensor
    """`[B, P]` int32."""
    kv_lens: torch.Tensor
    """`[B]` int32, at least 1: tokens in the cache, including those of the window."""
    tree: TreeMask | None = None
    """Which keys the rows see, if the windows are rows of trees; None: those up to their own."""


def num_splits(workspace: WindowWorkspace, num_tiles: int, num_rows: int, max_len: int) -> int:
    """Splits of a launch that has `num_tiles` programs and `num_rows` output rows without splits:
    as many as fill the device once."""
    wanted = workspace.num_processors // num_tiles
    fitting = len(workspace.outputs) // num_rows
    return max(1, min(wanted, fitting, -(-max_len // MIN_KEYS_PER_SPLIT), MAX_SPLITS))


@with_kernel("launch_latent_attention")
def latent_attention(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: LatentTables,
    scale: float,
    workspace: WindowWorkspace,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """The queries of request b are its last tokens, up to token kv_lens[b] - 1. Each attends to the
    keys up to its own, or to those that `tables.tree` names.

    Keys beyond a request's length or its block table are never read. A query before position 0,
    which only a row of graph padding can have, attends to nothing and gives zeros.

    Args:
        q_latent: `[H, T, R]`, contiguous: the queries times the key projection.
        q: `[T, H, N + P]`, contiguous; of each head the last P elements are read, rotated.
        layer: `[pages, page_size, R + P]`, contiguous, page_size a power of two; of q's dtype or
            CODES.
        tables: of the windows.
        scale: factor of the scores before the softmax.
        workspace: for partial results; overwritten.
        scales: of codes.

    Returns:
        `[H, T, R]`, contiguous: weighted latents.
    """
    return plain_latent_attention(q_latent, q, layer, tables, scale, scales)


def launch_latent_attention(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: LatentTables,
    scale: float,
    workspace: WindowWorkspace,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """The kernels of `latent_attention`."""
    for tensor in (q_latent, q, layer):
        assert tensor.is_contiguous() and tensor.dtype in (q.dtype, layer.dtype)
    assert q_latent.dtype == q.dtype and layer.dtype in (q.dtype, CODES)
    assert tables.block_tables.stride(1) == 1 and tables.kv_lens.stride(0) == 1
    assert tables.block_tables.dtype == tables.kv_lens.dtype == torch.int32
    assert tables.tree is None or tables.tree.rows.offsets is tables.rows.offsets
    (heads, num_tokens, rank), (_, page_size, width) = q_latent.shape, layer.shape
    output = torch.empty_like(q_latent)
    batch, window, tree = tables.rows.num_requests, tables.rows.window, tables.tree
    rows = heads * window
    block_r, block_p = power_of_two(rank), max(16, power_of_two(width - rank))
    shape = _tile_shape(rows, batch, workspace.num_processors, q.element_size())
    shared = shared_memory_bytes(q.device)
    shape = _fitting(shape, block_r + block_p, q.element_size(), shared)
    block_m, block_n = shape.rows, shape.keys
    num_tiles, max_len = -(-rows // block_m), tables.block_tables.shape[1] * page_size
    splits = num_splits(workspace, batch * num_tiles, batch * rows, max_len)
    attention_kernel[(num_tiles, batch, splits)](
        *(q_latent, q, layer, tables.block_tables, tables.block_tables.stride(0)),
        *(tables.kv_lens, max_len, num_tokens, scale * scales.key * math.log2(math.e), output),
        *(workspace.outputs, workspace.log_sums, splits),
        *((None, 0) if tree is None else (tree.bits, tree.length)),
        tables.rows.offsets,
        scales.key,
        **programmatic_launch(q.device),
        TREE=tree is not None,
        RAGGED=tables.rows.offsets is not None,
        SPLITS=splits > 1,
        WINDOW=window,
        HEADS=heads,
        RANK=rank,
        ROPE=width - rank,
        HEAD_DIM=q.shape[2],
        PAGE_SIZE=page_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        BLOCK_P=block_p,
        WIDEN=q.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if splits > 1:
        _reduce(output, tables, max_len, block_n, splits, workspace)
    return output


@dataclass(frozen=True)
class TileShape:
    """Query rows and keys of a program's step, and its launch. With R + P = 576 queries and keys in
    flight take 164 to 184 KiB of a multiprocessor's shared memory on Hopper."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def _tile_shape(num_rows: int, batch: int, num_processors: int, element_size: int) -> TileShape:
    """Small tiles of a short window while all fit the device at once: they read the same keys at
    the same time, from the L2 cache."""
    if element_size > 2:
        return TileShape(16, 16, 4, 2)
    num_small = -(-num_rows // 16)
    if num_small == 1 or (num_small <= 4 and num_small * batch <= num_processors):
        return TileShape(16, 64, 8, 3)
    return TileShape(64, 64, 8, 2) if num_rows > 32 else TileShape(32, 32, 4, 3)


def _fitting(shape: TileShape, width: int, element_size: int, shared_bytes: int) -> TileShape:
    """The shape, or with less shared memory than Hopper's one that fits: with fewer stages, or a
    smaller one. width: elements of a key, padded."""
    if shared_bytes >= HOPPER_BYTES:
        return shape
    shapes = (shape, replace(shape, num_stages=2), TileShape(32, 32, 4, 2))
    return next(
        (each for each in shapes if _shared_bytes(each, width, element_size) <= shared_bytes),
        TileShape(16, 16, 4, 2),
    )


def _shared_bytes(shape: TileShape, width: int, element_size: int) -> int:
    """Bytes of the queries, of the keys in flight without the block that is in registers, and of a
    block's weights."""
    keys_in_flight = (shape.num_stages - 1) * shape.keys
    elements = (shape.rows + keys_in_flight) * width + shape.rows * shape.keys
    return elements * element_size


def _reduce(
    output: torch.Tensor,
    tables: LatentTables,
    max_len: int,
    block_n: int,
    splits: int,
    workspace: WindowWorkspace,
) -> None:
    """Joins the partial results of the splits."""
    (heads, num_tokens, rank), own = output.shape, tables.rows
    block_s = power_of_two(splits)
    block_r = min(REDUCED_ELEMENTS // block_s, power_of_two(rank))
    reduction_kernel[(own.num_requests * own.window * heads, -(-rank // block_r))](
        *(workspace.outputs, workspace.log_sums, tables.kv_lens, max_len, num_tokens),
        *(output, splits, own.offsets),
        **programmatic_launch(output.device),
        RAGGED=own.offsets is not None,
        WINDOW=own.window,
        HEADS=heads,
        RANK=rank,
        BLOCK_N=block_n,
        BLOCK_S=block_s,
        BLOCK_R=block_r,
        num_warps=4,
    )


def plain_latent_attention(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    layer: torch.Tensor,
    tables: LatentTables,
    scale: float,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """Reference of `latent_attention`, in float32."""
    rank, (_, page_size, width) = q_latent.shape[2], layer.shape
    own = tables.rows
    keys = torch.arange(tables.block_tables.shape[1] * page_size, device=q.device)
    slots = tables.block_tables[:, keys // page_size] * page_size + keys % page_size  # [B, L]
    absent = keys >= tables.kv_lens[:, None]
    entries = layer.view(-1, width)[slots].float().masked_fill(absent[:, :, None], 0)
    queries = torch.cat((q_latent.transpose(0, 1), q[..., rank - width :]), -1)
    queries = own.padded(queries.float())
    hidden = hidden_keys(own, tables.kv_lens, keys, tables.tree) | absent[:, None]  # [B, W, L]
    scores = torch.einsum("bwhd,bld->hbwl", queries, entries) * (scale * scales.key)
    # The softmax of a row without keys is NaN; it becomes zeros.
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden, 0)
    mixed = torch.einsum("hbwl,blr->bwhr", weights, entries[..., :rank]) * scales.key
    return own.flat(mixed).transpose(0, 1).to(q.dtype).contiguous()


# One program computes a tile of query rows (heads of the window's tokens) over one split of one
# request's keys. A latent is loaded once, as key and as value. The softmax is online, in powers of
# two; splits are joined by their log-sums.
#
# The windows have WINDOW tokens each, or, if RAGGED, as many as `offsets` say, at most WINDOW.


_LENGTHS = ["max_len", "num_tokens", "num_splits", "table_stride", "tree_len"]
# In a mixed batch these start after the rows of the contexts, at any alignment. Specializing on the
# alignment would compile more kernels.
_OFFSETS = ["block_tables", "kv_lens", "tree_bits", "offsets"]


@triton.jit
def _share(
    kv_len: tl.tensor, max_len: tl.tensor, num_splits: tl.tensor, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Number of keys, a split's share of them in whole blocks, and the number of splits that have a
    share."""
    num_keys = tl.minimum(kv_len, max_len)
    share = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_N), 1) * BLOCK_N
    return num_keys, share, tl.maximum(tl.cdiv(num_keys, share), 1)


@triton.jit
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


@triton.jit
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


@triton.jit
def _seen(
    keys: tl.tensor, positions: tl.tensor, bits: tl.tensor, region: tl.tensor, TREE: tl.constexpr
) -> tl.tensor:
    """Which keys each row sees, `[M, N]`: those up to its position; of a tree, those before
    `region` and, from there on, those whose bit is set."""
    if TREE:
        return (keys < region)[None, :] | is_set(bits, tl.maximum(keys - region, 0))
    else:  # noqa: RET505 - Triton compiles what follows a return
        return keys[None, :] <= positions[:, None]


@triton.jit
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


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_OFFSETS)
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
) -> None:  # fmt: skip
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
    )  # fmt: skip
    bits = tl.load(tree_bits + tokens, mask=real_rows, other=0) if TREE else None
    region = kv_len - (width if RAGGED else tree_len)
    first = split * share
    pool = (layer, block_tables + request * table_stride, log2_scale, RANK, ROPE, PAGE_SIZE)
    top, total, mixed = _attend(
        (absorbed.to(dot_type), rotated.to(dot_type)), kv_len - width + new, bits, region, pool,
        first, tl.minimum(first + share, num_keys), BLOCK_N, TREE,
    )  # fmt: skip
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


@triton.jit(do_not_specialize=_LENGTHS, do_not_specialize_on_alignment=_OFFSETS[1:])
def reduction_kernel(
    partials: tl.tensor, log_sums: tl.tensor, kv_lens: tl.tensor, max_len: tl.tensor,
    num_tokens: tl.tensor, output: tl.tensor, num_splits: tl.tensor, offsets: tl.tensor,
    RAGGED: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
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
