"""Between the fused QKV projection and attention: norm of each head (if the model has it) and
rotary embedding of q and k, in place, and the write of K and V into their slots of the KV pool. A
norm may be of V, too.

`rotary_write` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition. It computes in float32 and rounds once; separate bfloat16 ops would round
up to four times (inverse RMS, weight, cosine, sum)."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tllm_spec.kernels.attention.kv_codes import (
    CODES,
    UNSCALED,
    KVScales,
    encoded,
    encoded_block,
    movable,
)
from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.slots.row_copies import gather_rows


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of the rows of one forward."""

    table: torch.Tensor
    """`[max_positions, 2, 1, D]`, contiguous: cosines, then sines. The sines of the first half of D
    are negated."""
    positions: torch.Tensor
    """`[T]` int64, rows of the table."""
    gathered: torch.Tensor | None = None
    """`cos_sin`, if another kernel has gathered it already."""

    @functools.cached_property
    def cos_sin(self) -> torch.Tensor:
        """The table's rows at the positions, `[T, 2, 1, D]`, contiguous. Gathered once for all
        layers. `rotary_write` reads the table instead."""
        return gather_rows(self.table, self.positions) if self.gathered is None else self.gathered

    @functools.cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, `[T, 1, D]` each."""
        cos, sin = self.cos_sin.unbind(1)
        return cos, sin

    def first(self, number: int) -> "Rotary":
        return Rotary(self.table, self.positions[:number])


@dataclass(frozen=True)
class HeadWeights:
    """RMSNorm of each head of q and k."""

    weight: torch.Tensor
    """`[Hq + Hkv, D]`, contiguous."""
    eps: float
    norms_values: bool = False
    """Whether heads of v are normed, too, without weights."""


@with_kernel("rotary_write_triton")
def rotary_write(
    qkv: torch.Tensor,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor | None,
    norm: HeadWeights | None = None,
    scales: KVScales = UNSCALED,
) -> None:
    """Norm and rotate q and k of `qkv` in place, and norm v if the norm says so; write k and v into
    the pool.

    Args:
        qkv: `[T, Hq + 2 * Hkv, D]`, contiguous, D even; heads of q, then k, then v.
        rotary: of these rows.
        kv_slots: `[T]` int64: page * page_size + offset.
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, of qkv's dtype or CODES; keys at 0,
            values at 1. None: there are heads of q only.
        norm: before the rotation, or None.
        scales: of codes.
    """
    if layer is None:
        plain_rotate(qkv, rotary, norm)
        return
    num_rows, num_heads, head_dim = qkv.shape
    kv_heads = layer.shape[3]
    plain_rotate(qkv[:, : num_heads - kv_heads], rotary, norm)
    if norm is not None and norm.norms_values:
        plain_norm_values(qkv[:, num_heads - kv_heads :], norm)
    kv = qkv[:, num_heads - 2 * kv_heads :].view(num_rows, 2, kv_heads, head_dim)
    plain_write_kv(kv, kv_slots, layer, scales)


def plain_rotate(q_and_k: torch.Tensor, rotary: Rotary, norm: HeadWeights | None = None) -> None:
    """Norm and rotate `[T, Hq + Hkv, D]` in place."""
    heads, head_dim = q_and_k.float(), q_and_k.shape[-1]
    if norm is not None:
        length = torch.linalg.vector_norm(heads, 2, -1, True)
        eps = length.new_full((), norm.eps)
        heads.mul_(torch.addcmul(eps, length, length, value=1 / head_dim).rsqrt_()).mul_(
            norm.weight
        )
    cos, sin = rotary.rows
    rolled = heads.roll(head_dim // 2, -1)
    heads.mul_(cos).addcmul_(rolled, sin)
    if heads is not q_and_k:
        q_and_k.copy_(heads)


def plain_norm_values(values: torch.Tensor, norm: HeadWeights) -> None:
    """Norm `[T, Hkv, D]` in place, without weights."""
    values.copy_(F.rms_norm(values, values.shape[2:], eps=norm.eps))


def plain_write_kv(
    kv: torch.Tensor, kv_slots: torch.Tensor, layer: torch.Tensor, scales: KVScales = UNSCALED
) -> torch.Tensor:
    """Write kv `[T, 2, Hkv, D]` into slots `[T]` of `layer` `[2, pages, page_size, Hkv, D]`.
    Returns what was written, `[2, T, Hkv, D]`."""
    stored = kv.transpose(0, 1)
    if kv.dtype != layer.dtype:
        keys, values = stored
        stored = torch.stack((encoded(keys, scales.key), encoded(values, scales.value)))
    movable(layer).view(2, -1, *layer.shape[3:]).index_copy_(1, kv_slots, movable(stored))
    return stored


# A program takes whole heads, so it has read both elements of each rotated pair before it
# overwrites one.
#
# V without a norm is copied exactly, and the pool gets the same K and V as `qkv`, or their codes.
# The rotation may use a fused multiply-add, and the norm's sum has another order than the
# reference's. So float32 results may differ by a few units in the last place, and 16-bit results
# by one.


# Pairs per program: in each half of the heads one 16-byte load of 2-byte elements per thread.
_PAIRS = 1024


def rotary_write_triton(
    qkv: torch.Tensor,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor | None,
    norm: HeadWeights | None = None,
    scales: KVScales = UNSCALED,
) -> None:
    """See `rotary_write`."""
    table, positions = rotary.table, rotary.positions
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    (num_rows, num_heads, head_dim), kv_heads = qkv.shape, 0
    if layer is None:
        layer = qkv  # nothing is written
    else:
        kv_heads = layer.shape[3]
    assert (
        head_dim % 2 == 0
        and layer.shape[-1] == table.shape[3] == head_dim
        and layer.dtype in (qkv.dtype, CODES)
    )
    for tensor in (qkv, table, positions, kv_slots, layer):
        assert tensor.is_contiguous()
    assert positions.shape == kv_slots.shape == (num_rows,)
    if norm_weight is not None:
        assert norm_weight.shape == (num_heads - kv_heads, head_dim) and norm_weight.is_contiguous()
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads = min(triton.next_power_of_2(num_heads), max(1, _PAIRS // block_half))
    rotary_write_kernel[(num_rows, triton.cdiv(num_heads, block_heads))](
        qkv,
        table,
        positions,
        kv_slots,
        layer,
        layer.stride(0),
        norm_weight,
        eps,
        1 / scales.key,
        1 / scales.value,
        HAS_NORM=norm_weight is not None,
        NORMS_VALUES=norm is not None and norm.norms_values,
        Q_HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
        **programmatic_launch(qkv.device),
    )


@triton.jit
def rotary_write_kernel(
    qkv: tl.tensor, table: tl.tensor, positions: tl.tensor, kv_slots: tl.tensor, layer: tl.tensor,
    value_offset: tl.tensor, norm_weight: tl.tensor, eps: tl.tensor, inverse_key_scale: tl.tensor,
    inverse_value_scale: tl.tensor, HAS_NORM: tl.constexpr, NORMS_VALUES: tl.constexpr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, blocks of heads). Tiles are `[heads, half of a head]`, one per half."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(positions + row), tl.load(kv_slots + row)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    real_dims = dims < HALF
    real = (heads < Q_HEADS + 2 * KV_HEADS) & real_dims
    is_rotated = (heads < Q_HEADS + KV_HEADS) & real_dims  # q and k
    pointers = qkv + (row * (Q_HEADS + 2 * KV_HEADS) + heads) * (2 * HALF) + dims
    old_low = tl.load(pointers, mask=real, other=0.0)
    old_high = tl.load(pointers + HALF, mask=real, other=0.0)
    low, high = old_low.to(tl.float32), old_high.to(tl.float32)
    if HAS_NORM:
        sum_square = tl.sum(low * low, 1, keep_dims=True) + tl.sum(high * high, 1, keep_dims=True)
        inverse_rms = tl.rsqrt(sum_square / (2 * HALF) + eps)
        weights = norm_weight + heads * (2 * HALF) + dims
        low *= inverse_rms * tl.load(weights, mask=is_rotated, other=1.0).to(tl.float32)
        high *= inverse_rms * tl.load(weights + HALF, mask=is_rotated, other=1.0).to(tl.float32)

    cosines = table + position * (4 * HALF) + dims
    sines = cosines + 2 * HALF
    cos_low = tl.load(cosines, mask=real_dims, other=0.0).to(tl.float32)
    cos_high = tl.load(cosines + HALF, mask=real_dims, other=0.0).to(tl.float32)
    sin_low = tl.load(sines, mask=real_dims, other=0.0).to(tl.float32)
    sin_high = tl.load(sines + HALF, mask=real_dims, other=0.0).to(tl.float32)
    own_type: tl.constexpr = qkv.dtype.element_ty
    is_new = is_rotated
    if NORMS_VALUES:
        old_low, old_high, is_new = low.to(own_type), high.to(own_type), real
    new_low = tl.where(is_rotated, (low * cos_low + high * sin_low).to(own_type), old_low)
    new_high = tl.where(is_rotated, (high * cos_high + low * sin_high).to(own_type), old_high)
    tl.store(pointers, new_low, mask=is_new)
    tl.store(pointers + HALF, new_high, mask=is_new)

    half = (heads >= Q_HEADS + KV_HEADS).to(tl.int64)  # 0: keys, 1: values
    kv_heads = slot * KV_HEADS + heads - Q_HEADS - half * KV_HEADS
    targets = layer + half * value_offset + kv_heads * (2 * HALF) + dims
    kept = real & (heads >= Q_HEADS)
    inverse_scale = tl.where(half == 0, inverse_key_scale, inverse_value_scale)
    stored: tl.constexpr = layer.dtype.element_ty
    tl.store(targets, encoded_block(new_low, inverse_scale, stored), mask=kept)
    tl.store(targets + HALF, encoded_block(new_high, inverse_scale, stored), mask=kept)
