"""Between the fused QKV projection and attention: norm of each head (if the model has it) and
rotary embedding of q and k, in place, and the write of K and V into their slots of the KV pool.

`rotary_write` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition. It computes in float32 and rounds once; separate bfloat16 ops would round
up to four times (inverse RMS, weight, cosine, sum)."""

import functools
from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.kv_codes import UNSCALED, KVScales, encoded, movable
from tllm_spec.kernels.row_copies import gather_rows


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


@with_kernel("rotary_write_triton.rotary_write_triton")
def rotary_write(
    qkv: torch.Tensor,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: HeadWeights | None = None,
    scales: KVScales = UNSCALED,
) -> None:
    """Norm and rotate q and k of `qkv` in place; write k and v into the pool.

    Args:
        qkv: `[T, Hq + 2 * Hkv, D]`, contiguous, D even; heads of q, then k, then v.
        rotary: of these rows.
        kv_slots: `[T]` int64: page * page_size + offset.
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, of qkv's dtype or CODES; keys at 0,
            values at 1.
        norm: before the rotation, or None.
        scales: of codes.
    """
    num_rows, num_heads, head_dim = qkv.shape
    kv_heads = layer.shape[3]
    plain_rotate(qkv[:, : num_heads - kv_heads], rotary, norm)
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
