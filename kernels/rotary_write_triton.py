"""The Triton kernel of rotary_write.py, which describes inputs and outputs. Importing this file
imports Triton.

A program takes whole heads, so it has read both elements of each rotated pair before it overwrites
one.

V is copied exactly, and the pool gets the same K as `qkv`, or the codes of both. The rotation may
use a fused multiply-add, and the norm's sum has another order than the reference's. So float32
results may differ by a few units in the last place, and 16-bit results by one."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.kv_codes_triton import encoded_block
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.rotary_write import HeadWeights, Rotary

# Pairs per program: in each half of the heads one 16-byte load of 2-byte elements per thread.
_PAIRS = 1024


def rotary_write_triton(
    qkv: torch.Tensor,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: HeadWeights | None = None,
    scales: KVScales = UNSCALED,
) -> None:
    """See `rotary_write`."""
    table, positions = rotary.table, rotary.positions
    norm_weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    (num_rows, num_heads, head_dim), kv_heads = qkv.shape, layer.shape[3]
    assert (
        head_dim % 2 == 0
        and layer.shape[4] == table.shape[3] == head_dim
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
        Q_HEADS=num_heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=head_dim // 2,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        num_warps=4,
        **programmatic_launch(qkv.device),
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def rotary_write_kernel(
    qkv: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    layer: tl.tensor,
    value_offset: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    inverse_key_scale: tl.tensor,
    inverse_value_scale: tl.tensor,
    HAS_NORM: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
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
        low *= inverse_rms * tl.load(weights, mask=is_rotated, other=0.0).to(tl.float32)
        high *= inverse_rms * tl.load(weights + HALF, mask=is_rotated, other=0.0).to(tl.float32)

    cosines = table + position * (4 * HALF) + dims
    sines = cosines + 2 * HALF
    cos_low = tl.load(cosines, mask=real_dims, other=0.0).to(tl.float32)
    cos_high = tl.load(cosines + HALF, mask=real_dims, other=0.0).to(tl.float32)
    sin_low = tl.load(sines, mask=real_dims, other=0.0).to(tl.float32)
    sin_high = tl.load(sines + HALF, mask=real_dims, other=0.0).to(tl.float32)
    own_type: tl.constexpr = qkv.dtype.element_ty
    new_low = tl.where(is_rotated, (low * cos_low + high * sin_low).to(own_type), old_low)
    new_high = tl.where(is_rotated, (high * cos_high + low * sin_high).to(own_type), old_high)
    tl.store(pointers, new_low, mask=is_rotated)
    tl.store(pointers + HALF, new_high, mask=is_rotated)

    half = (heads >= Q_HEADS + KV_HEADS).to(tl.int64)  # 0: keys, 1: values
    kv_heads = slot * KV_HEADS + heads - Q_HEADS - half * KV_HEADS
    targets = layer + half * value_offset + kv_heads * (2 * HALF) + dims
    kept = real & (heads >= Q_HEADS)
    inverse_scale = tl.where(half == 0, inverse_key_scale, inverse_value_scale)
    stored: tl.constexpr = layer.dtype.element_ty
    tl.store(targets, encoded_block(new_low, inverse_scale, stored), mask=kept)
    tl.store(targets + HALF, encoded_block(new_high, inverse_scale, stored), mask=kept)
