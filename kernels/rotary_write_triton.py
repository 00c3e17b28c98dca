"""The Triton kernel behind rotary_write.py, which says what goes in and comes out. Importing this
file imports Triton.

A program takes all of some heads, so that it has read both elements of each rotated pair before it
overwrites one.

Exact: values, and that the pool gets the very k that stays in `qkv`. The rotation may be contracted
to one product and one fused multiply-add, and the norm's sum is taken in another order than the
reference's: float32 results are a few steps of the larger product apart, bfloat16 and float16
results are the reference's or, at a rounding boundary, its neighbours.

Bytes of a row: Hq + 2 Hkv heads read, Hq + Hkv written in place, 2 Hkv written to the pool, and a
row of the table. An 8B Llama in bfloat16 (32 and 8 heads of 128): 27 KB. Predicted on an H200 (4.8
TB/s) inside a CUDA graph: T <= 8 is bound by the launch and three dependent trips to memory
(position, table, stores), 2 to 3 us; T = 512 moves 14 MB, 3 us from HBM, about 5 us in all. Not
measured."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

_PAIRS = 1024  # a program: 4 warps with one 16-byte load of 2-byte elements a thread for each half of the heads


def rotary_write_triton(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """See `rotary_write`."""
    (num_rows, num_heads, head_dim), kv_heads = qkv.shape, layer.shape[3]
    assert (
        head_dim % 2 == 0
        and layer.shape[4] == table.shape[3] == head_dim
        and qkv.dtype == layer.dtype
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
    HAS_NORM: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Grid (rows, blocks of heads). Tiles are `[heads, half of a head]`, one for each half."""
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    position, slot = tl.load(positions + row), tl.load(kv_slots + row)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    dims = tl.arange(0, BLOCK_HALF)[None, :]
    real_dims = dims < HALF
    real = (heads < Q_HEADS + 2 * KV_HEADS) & real_dims
    turns = (heads < Q_HEADS + KV_HEADS) & real_dims  # q and k
    places = qkv + (row * (Q_HEADS + 2 * KV_HEADS) + heads) * (2 * HALF) + dims
    old_low, old_high = (
        tl.load(places, mask=real, other=0.0),
        tl.load(places + HALF, mask=real, other=0.0),
    )
    low, high = old_low.to(tl.float32), old_high.to(tl.float32)
    if HAS_NORM:
        sum_square = tl.sum(low * low, 1, keep_dims=True) + tl.sum(high * high, 1, keep_dims=True)
        inverse_rms = tl.rsqrt(sum_square / (2 * HALF) + eps)
        weights = norm_weight + heads * (2 * HALF) + dims
        low *= inverse_rms * tl.load(weights, mask=turns, other=0.0).to(tl.float32)
        high *= inverse_rms * tl.load(weights + HALF, mask=turns, other=0.0).to(tl.float32)

    cosines = table + position * (4 * HALF) + dims
    sines = cosines + 2 * HALF
    cos_low = tl.load(cosines, mask=real_dims, other=0.0).to(tl.float32)
    cos_high = tl.load(cosines + HALF, mask=real_dims, other=0.0).to(tl.float32)
    sin_low = tl.load(sines, mask=real_dims, other=0.0).to(tl.float32)
    sin_high = tl.load(sines + HALF, mask=real_dims, other=0.0).to(tl.float32)
    new_low = tl.where(turns, (low * cos_low + high * sin_low).to(qkv.dtype.element_ty), old_low)
    new_high = tl.where(
        turns, (high * cos_high + low * sin_high).to(qkv.dtype.element_ty), old_high
    )
    tl.store(places, new_low, mask=turns)
    tl.store(places + HALF, new_high, mask=turns)

    half = (heads >= Q_HEADS + KV_HEADS).to(tl.int64)  # of the layer: keys or values
    kv_heads = slot * KV_HEADS + heads - Q_HEADS - half * KV_HEADS
    targets = layer + half * value_offset + kv_heads * (2 * HALF) + dims
    kept = real & (heads >= Q_HEADS)
    tl.store(targets, new_low, mask=kept)
    tl.store(targets + HALF, new_high, mask=kept)
