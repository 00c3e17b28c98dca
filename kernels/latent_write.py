"""Between the projections of MLA and its attention: RMSNorm of the latent, rotary embedding of the
shared key and of the queries' last elements, and the write of latent and key into their slots of
the KV pool.

`latent_write` is one Triton kernel if Triton is available, otherwise the plain-torch reference,
which is the definition."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.kv_codes import UNSCALED, KVScales, encoded, movable
from tllm_spec.kernels.rms_norm import rms_norm
from tllm_spec.kernels.rotary_write import Rotary, plain_rotate


@dataclass(frozen=True)
class LatentNorm:
    """RMSNorm of the latent."""

    weight: torch.Tensor
    """`[R]`, contiguous."""
    eps: float


@with_kernel("latent_write_triton.latent_write_triton")
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
