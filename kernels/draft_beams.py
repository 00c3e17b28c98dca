"""Dynamic draft trees: beam growth by cumulative probability, and the choice of the best nodes, as
in EAGLE-2 (Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees",
2024). On CUDA Triton kernels, elsewhere the plain-torch references.

A candidate's score is the float32 product of the probabilities on its path. A product of factors up
to 1 is never above its parent's, and equal scores go to the lower index, where the parent is, so a
chosen node's parent is always chosen. (Sums of logarithms would round differently and break ties
that such scores have.) A NaN counts as less than any score, and so do its descendants, which are
NaN: such a request gets a valid tree of no use."""

import torch

from tllm_spec.kernels.beam_pool import BeamPool, Beams, DraftTree
from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("draft_beams_triton.first_beams_triton")
def first_beams(pool: BeamPool, probs: torch.Tensor, tokens: torch.Tensor) -> Beams:
    """Step 0: the K best tokens `[B, K]` after the root and their probabilities, best first
    (`top_tokens`). All of them become candidates and beams."""
    batch, topk = probs.shape
    columns = torch.arange(topk, device=probs.device).expand(batch, topk)
    pool.scores[:, :topk] = probs
    pool.tokens[:, :topk] = tokens
    pool.beams[:, :topk] = columns
    rows = torch.arange(batch * topk, device=probs.device).view(batch, topk)
    return Beams(tokens, probs, rows, torch.ones_like(columns) << columns)


@with_kernel("draft_beams_triton.grow_triton")
def grow(
    pool: BeamPool, step: int, beams: Beams, probs: torch.Tensor, tokens: torch.Tensor
) -> Beams:
    """Step `step` >= 1: adds the children of all beams to the pool, and returns the K best.

    probs, tokens `[B, K, K]`: of each beam's K best next tokens, best first. The steps up to this
    one have at most 64 beams."""
    add_last.reference(pool, step, beams, probs, tokens)
    batch, topk = beams.tokens.shape
    start = pool.start(step)
    scores = pool.scores[:, start : start + topk**2]
    best = _best(scores, topk)
    pool.beams[:, step * topk : (step + 1) * topk] = best + start
    rows = best // topk
    columns = torch.arange(topk, device=best.device)
    own_bits = torch.ones_like(columns) << (columns + step * topk)
    return Beams(
        tokens.flatten(1).gather(1, best),
        scores.gather(1, best),
        rows + torch.arange(batch, device=best.device).unsqueeze(1) * topk,
        beams.bits.gather(1, rows) | own_bits,
    )


@with_kernel("draft_beams_triton.add_last_triton")
def add_last(
    pool: BeamPool, step: int, beams: Beams, probs: torch.Tensor, tokens: torch.Tensor
) -> None:
    """`grow` for the last step, after which the draft model runs no beams."""
    start, number = pool.start(step), pool.topk**2
    pool.scores[:, start : start + number] = (beams.scores.unsqueeze(2) * probs).flatten(1)
    pool.tokens[:, start : start + number] = tokens.flatten(1)


@with_kernel("draft_beams_triton.select_triton")
def select(pool: BeamPool, num_drafts: int, with_scores: bool = False) -> DraftTree:
    """The best `num_drafts` (W-1, 1 to 63) candidates of a full pool, with their scores or without.
    Raises nothing: the pool has at least so many candidates (`K + (S-1) K^2`)."""
    (batch, size), topk, device = pool.scores.shape, pool.topk, pool.scores.device
    chosen = _best(pool.scores, num_drafts).sort(dim=1).values  # node j + 1 is candidate chosen[j]
    nodes = torch.zeros((batch, size), dtype=torch.int64, device=device)
    numbers = torch.arange(1, num_drafts + 1, device=device).expand(batch, num_drafts)
    nodes.scatter_(1, chosen, numbers)
    has_root = chosen < topk
    parent = nodes.gather(1, pool.beams.gather(1, (chosen // topk - 1).clamp_min(0)))
    parents = torch.where(has_root, 0, parent)
    depths = torch.where(has_root, 1, (chosen - topk) // topk**2 + 2)
    own_bits = (torch.ones_like(numbers) << numbers) | 1
    bits = own_bits
    for _ in range((size - topk) // topk**2):  # after n turns: n generations of ancestors
        bits = own_bits | torch.where(has_root, 1, bits.gather(1, (parents - 1).clamp_min(0)))
    root = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    return DraftTree(
        pool.tokens.gather(1, chosen),
        torch.cat((root - 1, parents), dim=1),
        torch.cat((root, depths), dim=1),
        torch.cat((root + 1, bits), dim=1),
        scores=pool.scores.gather(1, chosen) if with_scores else None,
    )


def _best(scores: torch.Tensor, number: int) -> torch.Tensor:
    """Indices `[B, number]` of the best scores `[B, N]`, best first, equal ones by index, NaN
    last."""
    ordered = scores.nan_to_num(nan=-1.0).sort(dim=1, descending=True, stable=True)
    return ordered.indices[:, :number]
