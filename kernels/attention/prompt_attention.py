"""Paged attention of context chunks with heads that FlashInfer has no kernels for: each row attends
to its request's keys up to its own. A Triton kernel if Triton is available, otherwise the
plain-torch reference.

A program computes one tile (`QueryTiles`): consecutive tokens with all query heads of one KV head,
and `VALUE_D` of the elements of their results. Blocks of keys begin at absolute positions, so a
row's result has the same bits in every chunk and batch."""

import math

import torch

from tllm_spec.kernels.attention.batch_invariant_attention import (
    QueryTiles,
    batch_invariant_attention,
)
from tllm_spec.kernels.attention.kv_codes import UNSCALED, KVScales, widened
from tllm_spec.kernels.attention.visible_keys import KeySpan, first_key
from tllm_spec.kernels.attention.window_splits import add_keys, power_of_two
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import shared_memory_bytes

# Rows of a tile, and keys of a block: the first that fit into shared memory. Measured on an H200:
# two programs that compute all scores and half of the results each are faster than one.
BLOCKS = (128, 64), (64, 32), (32, 16), (16, 16)
VALUE_D = 256


def prompt_blocks(q: torch.Tensor, head_dim: int) -> tuple[int, int]:
    """Rows and keys for heads of q's type and device."""
    size, room = q.element_size(), shared_memory_bytes(q.device)
    width, value_d = power_of_two(head_dim), min(VALUE_D, power_of_two(head_dim))
    fitting = (
        (rows, keys)
        for rows, keys in BLOCKS
        if size * (rows * width + keys * (width + value_d)) <= room
    )
    return next(fitting, BLOCKS[-1])


def prompt_tokens_per_tile(q: torch.Tensor, head_dim: int, group: int) -> int:
    """group: query heads per KV head."""
    return max(1, prompt_blocks(q, head_dim)[0] // group)


@with_kernel("launch_prompts")
def prompt_attention(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    span: KeySpan | None = None,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """As `batch_invariant_attention` without trees and sinks, in tiles of at most
    `prompt_tokens_per_tile`. Returns `[T, Hq * D]`."""
    return batch_invariant_attention.reference(
        q, layer, block_tables, tiles, scale, None, span, scales
    )


def launch_prompts(
    q: torch.Tensor,
    layer: torch.Tensor,
    block_tables: torch.Tensor,
    tiles: QueryTiles,
    scale: float,
    span: KeySpan | None = None,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """The kernel of `prompt_attention`."""
    assert q.stride(2) == 1 and layer.is_contiguous() and block_tables.stride(1) == 1
    assert tiles.table.is_contiguous() and tiles.paths is None
    (num_rows, heads, head_dim), (page_size, kv_heads) = q.shape, layer.shape[2:4]
    group, block_d = heads // kv_heads, power_of_two(head_dim)
    value_d = min(VALUE_D, block_d)
    output = q.new_empty(num_rows, heads * head_dim)
    num_tiles = tiles.table.shape[1]
    block_m, block_n = prompt_blocks(q, head_dim)
    grid = (kv_heads * -(-head_dim // value_d), num_tiles)
    prompt_kernel[grid](
        *(q, layer, block_tables, tiles.table, output, scale * scales.key * math.log2(math.e)),
        *(*q.stride()[:2], layer.stride(0), block_tables.stride(0), num_tiles, scales.value),
        GROUP=group,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        SPAN=span.code if span else 0,
        WIDEN=q.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        BLOCK_M=max(block_m, power_of_two(group)),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        VALUE_D=value_d,
        num_warps=8,
        num_stages=1,
        enable_fp_fusion=False,  # it may depend on the surrounding code, so on the rows of a chunk
    )
    return output


@triton.jit
def _add_blocks(
    state: tl.tensor, queries: tl.tensor, positions: tl.tensor, pool: tl.tensor, first: tl.tensor,
    end: tl.tensor, lowest: tl.tensor, IS_CUT: tl.constexpr, SPAN: tl.constexpr,
    BLOCK_N: tl.constexpr, VALUE_D: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state of `add_keys` after the blocks at `first` to `end`. IS_CUT: whether some rows do
    not see some of their keys; keys below `lowest` and from `end` on are not read."""
    top, total, mixed = state
    layer, value_offset, table, kv_head, first_value, log2_scale, KV_HEADS, HEAD_DIM, SIZE = pool
    dims, value_dims = tl.arange(0, queries.shape[1]), first_value + tl.arange(0, VALUE_D)
    for block in tl.range(first, end, BLOCK_N):
        keys = block + tl.arange(0, BLOCK_N)
        if IS_CUT:
            own = (keys < end) & (keys >= lowest)
            pages = tl.load(table + keys // SIZE, mask=own, other=0)
        else:
            pages = tl.load(table + keys // SIZE)
        slots = pages.to(tl.int64) * SIZE + keys % SIZE
        rows = layer + (slots * KV_HEADS + kv_head)[:, None] * HEAD_DIM
        real, real_values = (dims < HEAD_DIM)[None, :], (value_dims < HEAD_DIM)[None, :]
        if IS_CUT:
            real, real_values = real & own[:, None], real_values & own[:, None]
        found = widened(tl.load(rows + dims[None, :], mask=real, other=0.0), queries.dtype)
        scores = tl.dot(queries, tl.trans(found), input_precision="ieee") * log2_scale
        if IS_CUT:
            seen = own[None, :] & (keys[None, :] <= positions[:, None])
            if SPAN:
                seen = seen & (keys[None, :] >= first_key(positions, SPAN)[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        values = rows + value_offset + value_dims[None, :]
        found = widened(tl.load(values, mask=real_values, other=0.0), queries.dtype)
        top, total, mixed = add_keys(top, total, mixed, scores, found)
    return top, total, mixed


@triton.jit(do_not_specialize=["num_tiles"])
def prompt_kernel(
    q: tl.tensor, layer: tl.tensor, block_tables: tl.tensor, tiles: tl.tensor, output: tl.tensor,
    log2_scale: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor,
    value_offset: tl.tensor, table_stride: tl.tensor, num_tiles: tl.tensor, value_scale: tl.tensor,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    SPAN: tl.constexpr, WIDEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, VALUE_D: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (KV heads * parts of the results, tiles). Tiles of a chunk with the most keys begin
    first."""
    kv_head = tl.program_id(0) % KV_HEADS
    first_value = tl.program_id(0) // KV_HEADS * VALUE_D
    tile = tiles + num_tiles - 1 - tl.program_id(1)
    first_row, start = tl.load(tile), tl.load(tile + num_tiles)
    count = tl.load(tile + 2 * num_tiles)
    table = block_tables + tl.load(tile + 3 * num_tiles).to(tl.int64) * table_stride
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    real = (tokens < count)[:, None]
    pointers = q + (first_row + tokens).to(tl.int64)[:, None] * token_stride
    pointers += (heads * head_stride)[:, None] + dims[None, :]
    queries = tl.load(pointers, mask=real & (dims < HEAD_DIM)[None, :], other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)
    positions, end = start + tokens, start + count
    # Of the first token, which sees the earliest keys, and of the last one.
    lowest, cut_end = first_key(start, SPAN) if SPAN else 0, 0
    if SPAN:
        cut_end = tl.cdiv(first_key(end - 1, SPAN), BLOCK_N) * BLOCK_N
    first = lowest // BLOCK_N * BLOCK_N
    whole = tl.maximum(start // BLOCK_N * BLOCK_N, first)  # all rows see all keys before
    pool = (
        layer, value_offset, table, kv_head, first_value, log2_scale, KV_HEADS, HEAD_DIM, PAGE_SIZE,
    )  # fmt: skip
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    state = (top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, VALUE_D], tl.float32))
    if SPAN:
        cut_end = tl.minimum(tl.maximum(cut_end, first), whole)
        state = _add_blocks(
            state, queries, positions, pool, first, cut_end, lowest, True, SPAN, BLOCK_N, VALUE_D
        )
        first = cut_end
    state = _add_blocks(
        state, queries, positions, pool, first, whole, lowest, False, SPAN, BLOCK_N, VALUE_D
    )
    top, total, mixed = _add_blocks(
        state, queries, positions, pool, whole, end, lowest, True, SPAN, BLOCK_N, VALUE_D
    )
    mean = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    if layer.dtype.element_ty == tl.float8e4nv:
        mean *= value_scale
    value_dims = first_value + tl.arange(0, VALUE_D)
    out_rows = (first_row + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads
    targets = output + out_rows[:, None] * HEAD_DIM + value_dims[None, :]
    tl.store(
        targets, mean.to(output.dtype.element_ty), mask=real & (value_dims < HEAD_DIM)[None, :]
    )
