"""The Triton kernel of batch_invariant_latent.py, which describes inputs and outputs. Importing
this file imports Triton. How keys that a row does not see leave its bits alone is in
batch_invariant_attention_triton.py."""

import triton
import triton.language as tl

from tllm_spec.kernels.batch_invariant_attention_triton import join
from tllm_spec.kernels.latent_attention_triton import latent_scores, load_queries

_LENGTHS = ["table_stride", "max_len", "num_splits", "num_tiles", "region"]


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend(
    absorbed: tl.tensor,
    rotated: tl.tensor,
    positions: tl.tensor,
    layer: tl.tensor,
    table: tl.tensor,
    path: tl.tensor,
    start: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    log2_scale: tl.tensor,
    TREE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """One split, the keys at positions `first` to `end`: each row's weighted mean of the latents,
    and log2 of the sum of its weights. Of a tree, position start + i is key i of the path."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for block in tl.range(first, end, BLOCK_N):
        key_positions = block + tl.arange(0, BLOCK_N)
        own, keys = key_positions < end, key_positions
        if TREE:
            in_region = own & (key_positions >= start)
            on_path = tl.load(path + (key_positions - start), mask=in_region, other=0)
            keys = tl.where(in_region, start + on_path, key_positions)
        pages = tl.load(table + keys // PAGE_SIZE, mask=own, other=0)
        latents, scores = latent_scores(
            absorbed, rotated, layer, pages, keys, own, RANK, ROPE, PAGE_SIZE, BLOCK_R, BLOCK_P
        )
        seen = own[None, :] & (key_positions[None, :] <= positions[:, None])
        scores = tl.where(seen, scores * log2_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf: no key seen so far
        weights, decay = tl.exp2(scores - base[:, None]), tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        mixed = tl.dot(
            weights.to(absorbed.dtype), latents, mixed * decay[:, None], input_precision="ieee"
        )
        top = new_top
    mean = tl.div_rn(mixed, tl.where(total == 0.0, 1.0, total)[:, None])
    return mean, top + tl.log2(total)


# fmt: off
@triton.jit(do_not_specialize=_LENGTHS)  # type: ignore[untyped-decorator]  # triton has no types
def latent_kernel(
    q_latent: tl.tensor, q: tl.tensor, layer: tl.tensor, block_tables: tl.tensor, tiles: tl.tensor,
    output: tl.tensor, log_sums: tl.tensor, log2_scale: tl.tensor, table_stride: tl.tensor,
    max_len: tl.tensor, num_splits: tl.tensor, num_tiles: tl.tensor, paths: tl.tensor,
    path_lens: tl.tensor, region: tl.tensor, latent_scale: tl.tensor, TREE: tl.constexpr,
    SPREADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr,
    ROPE: tl.constexpr, PAGE_SIZE: tl.constexpr, WIDEN: tl.constexpr, SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
) -> None:
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
    )
    absorbed, rotated, positions = absorbed.to(dot_type), rotated.to(dot_type), start + lens - 1
    if SPREADS:
        first = split * SPLIT_KEYS
        mean, log_sum = _attend(
            absorbed, rotated, positions, layer, table, path, start, first,
            tl.minimum(first + SPLIT_KEYS, length), log2_scale, TREE, RANK, ROPE, PAGE_SIZE,
            BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_P,
        )
        rows = rows * num_splits + split
        tl.store(log_sums + rows, log_sum, mask=is_real)
    else:
        mean = _attend_all(
            absorbed, rotated, positions, layer, table, path, start, length, log2_scale, TREE,
            RANK, ROPE, PAGE_SIZE, SPLIT_KEYS, BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_P,
        )
        if layer.dtype.element_ty == tl.float8e4nv:
            mean *= latent_scale
    targets = output + rows[:, None] * RANK + ranks[None, :]
    real = is_real[:, None] & (ranks < RANK)[None, :]
    tl.store(targets, mean.to(output.dtype.element_ty), mask=real)
# fmt: on


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _attend_all(
    absorbed: tl.tensor,
    rotated: tl.tensor,
    positions: tl.tensor,
    layer: tl.tensor,
    table: tl.tensor,
    path: tl.tensor,
    start: tl.tensor,
    length: tl.tensor,
    log2_scale: tl.tensor,
    TREE: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
) -> tl.tensor:
    """All splits of `length` keys, joined."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mean = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for first in tl.range(0, length, SPLIT_KEYS):
        own, log_sum = _attend(
            absorbed, rotated, positions, layer, table, path, start, first,
            tl.minimum(first + SPLIT_KEYS, length), log2_scale, TREE, RANK, ROPE, PAGE_SIZE,
            BLOCK_M, BLOCK_N, BLOCK_R, BLOCK_P,
        )  # fmt: skip
        top, decay, weight = join(top, log_sum)
        total = total * decay + weight
        mean = mean * decay[:, None] + own * weight[:, None]
    return tl.div_rn(mean, tl.where(total == 0.0, 1.0, total)[:, None])
