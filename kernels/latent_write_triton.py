"""The Triton kernel of latent_write.py, which describes inputs and outputs. Importing this file
imports Triton.

The norm's sum has another order than the reference's, and the rotation may use a fused
multiply-add: float32 results may differ by a few units in the last place, 16-bit results by one."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.kv_codes import CODES, UNSCALED, KVScales
from tllm_spec.kernels.kv_codes_triton import encoded_block
from tllm_spec.kernels.latent_write import LatentNorm
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.rotary_write import Rotary

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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def latent_write_kernel(
    latent: tl.tensor,
    latent_stride: tl.tensor,
    q: tl.tensor,
    table: tl.tensor,
    positions: tl.tensor,
    kv_slots: tl.tensor,
    layer: tl.tensor,
    norm_weight: tl.tensor,
    eps: tl.tensor,
    inverse_scale: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
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
