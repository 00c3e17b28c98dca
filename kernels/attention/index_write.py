"""Between the projections of an indexer and its scores: LayerNorm of the keys, rotary embedding of
the first elements of keys and queries, and the write of keys into their slots of the KV pool.

`index_write` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tllm_spec.kernels.attention.rotary_write import Rotary, plain_rotate
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch


@dataclass(frozen=True)
class IndexNorm:
    """LayerNorm of the keys."""

    weight: torch.Tensor
    """`[D]`, contiguous."""
    bias: torch.Tensor
    """`[D]`, contiguous."""
    eps: float


@with_kernel("index_write_triton")
def index_write(
    keys: torch.Tensor,
    queries: torch.Tensor | None,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: IndexNorm,
) -> None:
    """Write the normed and rotated keys into the pool; rotate the queries in place.

    Args:
        keys: `[T, D]` as projected, any stride between rows; the first P elements are rotated.
        queries: `[T, H, D]`, contiguous; of each head the first P elements are rotated. None:
            nothing but the pool is written.
        rotary: of these rows, for P elements.
        kv_slots: `[T]` int64: page * page_size + offset.
        layer: `[pages, page_size, D]`, contiguous, of the keys' dtype.
        norm: of the keys.
    """
    rope = rotary.table.shape[3]
    weights = norm.weight.float(), norm.bias.float()
    normed = F.layer_norm(keys.float(), keys.shape[1:], *weights, norm.eps).to(keys.dtype)
    plain_rotate(normed[:, None, :rope], rotary)
    layer.view(-1, layer.shape[-1]).index_copy_(0, kv_slots, normed)
    if queries is not None:
        plain_rotate(queries[..., :rope], rotary)


_HEADS = 32  # of a program that rotates queries


def index_write_triton(
    keys: torch.Tensor,
    queries: torch.Tensor | None,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: IndexNorm,
) -> None:
    """See `index_write`."""
    (num_rows, size), half = keys.shape, rotary.table.shape[3] // 2
    assert keys.stride(1) == 1 and layer.is_contiguous() and layer.dtype == keys.dtype
    assert queries is None or queries.is_contiguous()
    num_heads = 0 if queries is None else queries.shape[1]
    index_write_kernel[(num_rows, 1 + triton.cdiv(num_heads, _HEADS))](
        *(keys, keys.stride(0), queries, rotary.table, rotary.positions, kv_slots, layer),
        *(norm.weight, norm.bias, norm.eps),
        SIZE=size,
        HALF=half,
        NUM_HEADS=num_heads,
        BLOCK_SIZE=triton.next_power_of_2(size),
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_HEADS=_HEADS,
        num_warps=4,
        **programmatic_launch(keys.device),
    )


@triton.jit
def index_write_kernel(
    keys: tl.tensor, key_stride: tl.tensor, queries: tl.tensor, table: tl.tensor,
    positions: tl.tensor, kv_slots: tl.tensor, layer: tl.tensor, norm_weight: tl.tensor,
    norm_bias: tl.tensor, eps: tl.tensor, SIZE: tl.constexpr, HALF: tl.constexpr,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, 1 + blocks of heads): the first program of a row writes into the pool, the others
    rotate queries."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, BLOCK_HALF)
    own = pairs < HALF
    cosines = table + tl.load(positions + row) * (4 * HALF) + pairs
    cos = tl.load(cosines, mask=own, other=0.0).to(tl.float32)
    sin = tl.load(cosines + 3 * HALF, mask=own, other=0.0).to(tl.float32)  # not negated
    stored: tl.constexpr = layer.dtype.element_ty
    if part == 0:
        columns = tl.arange(0, BLOCK_SIZE)
        real = columns < SIZE
        source = keys + row * key_stride
        values = tl.load(source + columns, mask=real, other=0.0).to(tl.float32)
        mean = tl.sum(values, 0) / SIZE
        centred = tl.where(real, values - mean, 0.0)
        factor = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
        weights = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
        biases = tl.load(norm_bias + columns, mask=real, other=0.0).to(tl.float32)
        normed = (centred * factor * weights + biases).to(stored)
        target = layer + tl.load(kv_slots + row) * SIZE
        tl.store(target + columns, normed, mask=real & (columns >= 2 * HALF))
        low = _normed(source, pairs, own, mean, factor, norm_weight, norm_bias, stored)
        high = _normed(source, HALF + pairs, own, mean, factor, norm_weight, norm_bias, stored)
        tl.store(target + pairs, (low * cos - high * sin).to(stored), mask=own)
        tl.store(target + HALF + pairs, (high * cos + low * sin).to(stored), mask=own)
    elif NUM_HEADS > 0:  # there are no queries otherwise, not even a pointer
        heads = (part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        real_pairs = (heads < NUM_HEADS)[:, None] & own[None, :]
        pointers = queries + ((row * NUM_HEADS + heads) * SIZE)[:, None] + pairs[None, :]
        q_low = tl.load(pointers, mask=real_pairs, other=0.0).to(tl.float32)
        q_high = tl.load(pointers + HALF, mask=real_pairs, other=0.0).to(tl.float32)
        first = q_low * cos[None, :] - q_high * sin[None, :]
        second = q_high * cos[None, :] + q_low * sin[None, :]
        tl.store(pointers, first.to(queries.dtype.element_ty), mask=real_pairs)
        tl.store(pointers + HALF, second.to(queries.dtype.element_ty), mask=real_pairs)


@triton.jit
def _normed(
    source: tl.tensor, columns: tl.tensor, own: tl.tensor, mean: tl.tensor, factor: tl.tensor,
    norm_weight: tl.tensor, norm_bias: tl.tensor, stored: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Normed elements at `columns`, rounded to the pool's type, in float32."""
    values = tl.load(source + columns, mask=own, other=0.0).to(tl.float32) - mean
    weights = tl.load(norm_weight + columns, mask=own, other=0.0).to(tl.float32)
    biases = tl.load(norm_bias + columns, mask=own, other=0.0).to(tl.float32)
    return (values * factor * weights + biases).to(stored).to(tl.float32)
