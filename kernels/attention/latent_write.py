"""Between the projections of MLA and its attention: RMSNorm of the latent, rotary embedding of the
shared key and of the queries' last elements, and the write of latent and key into their slots of
the KV pool.

`latent_write` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.attention.kv_codes import (
    CODES,
    UNSCALED,
    KVScales,
    encoded,
    encoded_block,
    movable,
)
from tllm_spec.kernels.attention.rotary_write import Rotary, plain_rotate
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.gemm.norms import rms_norm
from tllm_spec.kernels.launch import begin, programmatic_launch


@dataclass(frozen=True)
class LatentNorm:
    """RMSNorm of the latent."""

    weight: torch.Tensor
    """`[R]`, contiguous."""
    eps: float


@with_kernel("latent_write_triton")
def latent_write(
    latent: torch.Tensor,
    q: torch.Tensor | None,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: LatentNorm,
    scales: KVScales = UNSCALED,
) -> None:
    """Write the normed latents and the rotated keys into the pool; rotate q in place.

    Args:
        latent: `[T, R + P]` as projected, any stride between rows: the latent, then the key.
        q: `[T, H, N + P]`, contiguous; the last P elements of each head are rotated. None: nothing
            but the pool is written.
        rotary: of these rows, for P elements.
        kv_slots: `[T]` int64: page * page_size + offset.
        layer: `[pages, page_size, R + P]`, contiguous, of latent's dtype or CODES.
        norm: of the latent.
        scales: of codes.
    """
    size = len(norm.weight)
    key = latent[:, None, size:].clone()
    plain_rotate(key, rotary)
    normed = rms_norm.reference(latent[:, :size], norm.weight, norm.eps)
    entries = torch.cat((normed, key[:, 0]), -1)
    if entries.dtype != layer.dtype:
        entries = encoded(entries, scales.key)
    movable(layer).view(-1, layer.shape[-1]).index_copy_(0, kv_slots, movable(entries))
    if q is not None:
        plain_rotate(q[..., size - layer.shape[-1] :], rotary)


# The norm's sum has another order than the reference's, and the rotation may use a fused multiply-
# add: float32 results may differ by a few units in the last place, 16-bit results by one.


_PAIRS = 1024  # of a program that rotates queries


def latent_write_triton(
    latent: torch.Tensor,
    q: torch.Tensor | None,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: LatentNorm,
    scales: KVScales = UNSCALED,
) -> None:
    """See `latent_write`."""
    table, positions = rotary.table, rotary.positions
    num_rows, size, rope_dim = len(latent), len(norm.weight), table.shape[3]
    assert latent.shape[1] == layer.shape[2] == size + rope_dim and latent.stride(1) == 1
    assert layer.is_contiguous() and layer.dtype in (latent.dtype, CODES)
    assert positions.shape == kv_slots.shape == (num_rows,)
    assert positions.is_contiguous() and kv_slots.is_contiguous() and table.is_contiguous()
    assert q is None or q.is_contiguous()
    half = rope_dim // 2
    num_heads, head_dim = (0, 0) if q is None else (q.shape[1], q.shape[2])
    block_half = triton.next_power_of_2(half)
    block_heads = max(1, _PAIRS // block_half)
    latent_write_kernel[(num_rows, 1 + triton.cdiv(num_heads, block_heads))](
        latent,
        latent.stride(0),
        q,
        table,
        positions,
        kv_slots,
        layer,
        norm.weight,
        norm.eps,
        1 / scales.key,
        SIZE=size,
        HALF=half,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=triton.next_power_of_2(size),
        BLOCK_HALF=block_half,
        BLOCK_HEADS=block_heads,
        num_warps=4,
        **programmatic_launch(latent.device),
    )


@triton.jit
def latent_write_kernel(
    latent: tl.tensor, latent_stride: tl.tensor, q: tl.tensor, table: tl.tensor,
    positions: tl.tensor, kv_slots: tl.tensor, layer: tl.tensor, norm_weight: tl.tensor,
    eps: tl.tensor, inverse_scale: tl.tensor, SIZE: tl.constexpr, HALF: tl.constexpr,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, PDL: tl.constexpr,
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
    own_type: tl.constexpr = latent.dtype.element_ty
    if part == 0:
        columns = tl.arange(0, BLOCK_SIZE)
        real = columns < SIZE
        source = latent + row * latent_stride
        values = tl.load(source + columns, mask=real, other=0.0).to(tl.float32)
        weights = tl.load(norm_weight + columns, mask=real, other=0.0).to(tl.float32)
        mean_square = tl.div_rn(tl.sum(values * values, 0), SIZE * 1.0)
        normed = values * tl.rsqrt(mean_square + eps) * weights
        target = layer + tl.load(kv_slots + row) * (SIZE + 2 * HALF)
        entry = encoded_block(normed.to(own_type), inverse_scale, stored)
        tl.store(target + columns, entry, mask=real)
        low = tl.load(source + SIZE + pairs, mask=own, other=0.0).to(tl.float32)
        high = tl.load(source + SIZE + HALF + pairs, mask=own, other=0.0).to(tl.float32)
        new_low, new_high = low * cos - high * sin, high * cos + low * sin
        low = encoded_block(new_low.to(own_type), inverse_scale, stored)
        high = encoded_block(new_high.to(own_type), inverse_scale, stored)
        tl.store(target + SIZE + pairs, low, mask=own)
        tl.store(target + SIZE + HALF + pairs, high, mask=own)
    elif NUM_HEADS > 0:  # there are no queries otherwise, not even a pointer
        heads = (part - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        real_pairs = (heads < NUM_HEADS)[:, None] & own[None, :]
        starts = q + (row * NUM_HEADS + heads) * HEAD_DIM + HEAD_DIM - 2 * HALF
        pointers = starts[:, None] + pairs[None, :]
        q_low = tl.load(pointers, mask=real_pairs, other=0.0).to(tl.float32)
        q_high = tl.load(pointers + HALF, mask=real_pairs, other=0.0).to(tl.float32)
        first = q_low * cos[None, :] - q_high * sin[None, :]
        second = q_high * cos[None, :] + q_low * sin[None, :]
        tl.store(pointers, first.to(q.dtype.element_ty), mask=real_pairs)
        tl.store(pointers + HALF, second.to(q.dtype.element_ty), mask=real_pairs)
