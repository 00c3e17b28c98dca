"""From a fused projection's output to what attention reads: norm of each head (where a model has
it) and rotary embedding of q and k, in place, and the rows' K and V into their slots of the KV
pool.

`rotary_write` runs one Triton kernel where there is any and its plain-torch reference, which is the
definition, elsewhere. All of it is float32 and rounded once; bfloat16 ops one after another would
round up to four times (inverse RMS, weight, cosine, sum). Neither knows requests or plans: one
layer of the pool, one launch."""

import functools
from dataclasses import dataclass

import torch

from tllm_spec.kernels.row_copies import gather_rows
from tllm_spec.kernels.triton_support import has_kernels


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of one forward's rows."""

    table: torch.Tensor
    """`[max_positions, 2, 1, D]`, contiguous: cosines, then sines, those of the first half of D with a minus."""
    positions: torch.Tensor
    """`[T]` int64, rows of the table."""
    known: torch.Tensor | None = None
    """What `gathered` gives, from whoever had a launch for it anyway."""

    @functools.cached_property
    def gathered(self) -> torch.Tensor:
        """The table's rows `[T, 2, 1, D]`, contiguous: gathered once for all layers that ask, which
        `rotary_write` does not."""
        return gather_rows(self.table, self.positions) if self.known is None else self.known

    @functools.cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[T, 1, D]`."""
        cos, sin = self.gathered.unbind(1)
        return cos, sin

    def first(self, number: int) -> "Rotary":
        return Rotary(self.table, self.positions[:number])


@dataclass(frozen=True)
class HeadWeights:
    """RMSNorm over each head of q and k."""

    weight: torch.Tensor
    """`[Hq + Hkv, D]`, contiguous."""
    eps: float


def rotary_write(
    qkv: torch.Tensor,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: HeadWeights | None = None,
) -> None:
    """Norm and rotate q and k of `qkv` in place; put k and v into the pool.

    Args:
        qkv: `[T, Hq + 2 * Hkv, D]`, contiguous, D even; the heads of q, then k, then v.
        rotary: of these rows.
        kv_slots: `[T]` int64: page * page_size + offset.
        layer: `[2, pages, page_size, Hkv, D]`, contiguous, of qkv's dtype; keys at 0, values at 1.
        norm: before the rotation; None: none.
    """
    if not has_kernels(qkv.device):
        plain_rotary_write(qkv, rotary, kv_slots, layer, norm)
        return
    from tllm_spec.kernels.rotary_write_triton import rotary_write_triton

    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    rotary_write_triton(qkv, rotary.table, rotary.positions, kv_slots, layer, weight, eps)


def plain_rotary_write(
    qkv: torch.Tensor,
    rotary: Rotary,
    kv_slots: torch.Tensor,
    layer: torch.Tensor,
    norm: HeadWeights | None = None,
) -> None:
    """The reference of `rotary_write`."""
    num_rows, num_heads, head_dim = qkv.shape
    kv_heads = layer.shape[3]
    plain_rotate(qkv[:, : num_heads - kv_heads], rotary, norm)
    kv = qkv[:, num_heads - 2 * kv_heads :].view(num_rows, 2, kv_heads, head_dim)
    plain_write_kv(kv, kv_slots, layer)


def plain_rotate(q_and_k: torch.Tensor, rotary: Rotary, norm: HeadWeights | None = None) -> None:
    """Norm and rotate `[T, Hq + Hkv, D]` in place. float32 heads are not copied."""
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


def plain_write_kv(kv: torch.Tensor, kv_slots: torch.Tensor, layer: torch.Tensor) -> None:
    """Put the rows of kv `[T, 2, Hkv, D]` into slots `[T]` of `layer` `[2, pages, page_size, Hkv,
    D]`."""
    layer.view(2, -1, *layer.shape[3:]).index_copy_(1, kv_slots, kv.transpose(0, 1))
