"""Sums the outputs of a token's experts with their weights: a Triton kernel if Triton is available,
otherwise the plain-torch reference.

A token's experts are added in the order of their scores, in float32, so the sum does not depend on
other tokens."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel


@dataclass(frozen=True)
class OwnExperts:
    """The `number` experts that a rank has, from `first` on, and `experts` `[T, k]` int32,
    contiguous: those of each token."""

    experts: torch.Tensor
    first: int
    number: int


@with_kernel("moe_combine_triton.moe_combine_triton")
def moe_combine(
    parts: torch.Tensor,
    weights: torch.Tensor | None,
    top_k: int,
    add_to: torch.Tensor | None = None,
    own: OwnExperts | None = None,
) -> torch.Tensor:
    """`[T, H]`: the weighted sum over the k experts, rounded once; added to `add_to` if given.

    Args:
        parts: `[T * k, H]`, contiguous.
        weights: `[T, k]` float32, or None for ones.
        top_k: k.
        add_to: the residual stream `[T, H]`, contiguous; changed in place and returned.
        own: only their outputs are added, the others are not read; None: all are.
    """
    if own is not None:
        number = own.experts.flatten() - own.first
        is_elsewhere = (number < 0) | (number >= own.number)
        parts = parts.masked_fill(is_elsewhere.view(-1, 1), 0)
    by_token = parts.view(-1, top_k, parts.shape[1]).float()
    if weights is not None:
        by_token = by_token * weights[..., None]
    total = by_token[:, 0].clone()
    for choice in range(1, top_k):
        total += by_token[:, choice]
    if add_to is None:
        return total.to(parts.dtype)
    return add_to.copy_(total.add_(add_to))
