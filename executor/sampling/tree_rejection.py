"""Rejection sampling on a tree of drafts by the target's probabilities alone, as SGLang's: at each
node the children are tried in order with one coin, each with its probability; if none is taken, the
token is drawn from the rest of the distribution.

The k-th child is taken with exactly its probability p, and what remains is p without the children,
so the rule is lossless in distribution for any tree, if both thresholds are 1. Lower thresholds
accept more and are lossy."""

import torch

from tllm_spec.kernels.accept_tree import Accepted, descend
from tllm_spec.kernels.choose_token import choose_best
from tllm_spec.kernels.gumbel import COIN_DOMAIN, RESIDUAL_DOMAIN, gumbel_noise, uniform

_MIN_THRESHOLD = 1e-9


def reject_tree(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
    num_drafts: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Accepted:
    """Accepted rows `[B, D+1]`, emitted tokens `[B, D+1]` and their numbers `[B]`, padded as those
    of `accept_tree`, where tokens, parents, depth and num_drafts are described.

    probs `[B, W, V]`: the target's distribution after each node. seeds `[B]`; positions `[B]`: of
    the token after the root. A position's coin and noise are keyed by (seed, position): a path has
    one node at each.

    A child is taken if the coin is below the probabilities of it and the children tried before,
    divided by `threshold_acc`, or if its own probability is at least `threshold_single` (both 0 to
    1). If a probability is NaN, no child is taken and -1 is emitted."""
    batch, width = tokens.shape
    nodes = torch.arange(width, device=tokens.device)
    own = _own_probs(probs, tokens, parents, num_drafts)
    # A sibling tried before, or the node itself: [B, W, W].
    tried = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (nodes <= nodes.unsqueeze(1))
    running = (tried * own.unsqueeze(1)).sum(dim=2)
    steps = torch.arange(depth + 1, device=tokens.device)
    coins = uniform(
        seeds.repeat_interleave(depth + 1), (positions.unsqueeze(1) + steps).flatten(), COIN_DOMAIN
    ).view(batch, depth + 1)
    coin = coins.gather(1, (_depths(parents, depth) - 1).clamp_min(0))
    is_open = coin < running / max(threshold_acc, _MIN_THRESHOLD)
    is_open |= own >= threshold_single
    rows, lens = descend(is_open & (own > 0), parents, depth)
    last_row = rows[:, -1:]
    final = _without_children(probs, tokens, own, parents == last_row, last_row)
    noise = gumbel_noise(seeds, positions + lens - 1, final.shape[1], RESIDUAL_DOMAIN)
    last = choose_best(final.log() + noise).unsqueeze(1)
    drafts = torch.cat((tokens.gather(1, rows[:, 1:]), last), dim=1)
    return rows, torch.where(steps < lens.unsqueeze(1) - 1, drafts, last), lens


def _own_probs(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    num_drafts: torch.Tensor | None,
) -> torch.Tensor:
    """The probability of each node's token after its parent, `[B, W]` float64. 0 for the root,
    padding, and nodes whose token an earlier sibling has: that token was tried already."""
    batch, width, vocab_size = probs.shape
    nodes = torch.arange(width, device=tokens.device)
    flat = parents.clamp_min(0) * vocab_size + tokens
    own = probs.reshape(batch, width * vocab_size).gather(1, flat).double()
    equal = (parents.unsqueeze(2) == parents.unsqueeze(1)) & (
        flat.unsqueeze(2) == flat.unsqueeze(1)
    )
    is_draft = (parents >= 0) & ~(equal & (nodes < nodes.unsqueeze(1))).any(dim=2)
    if num_drafts is not None:
        is_draft &= nodes <= num_drafts.unsqueeze(1)
    return torch.where(is_draft, own, 0.0)


def _depths(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """`[B, W]`: drafts on the path to each node."""
    ancestors, depths = parents, torch.zeros_like(parents)
    for _ in range(depth):
        depths = depths + (ancestors >= 0)
        ancestors = torch.where(
            ancestors >= 0, parents.gather(1, ancestors.clamp_min(0)), ancestors
        )
    return depths


def _without_children(
    probs: torch.Tensor,
    tokens: torch.Tensor,
    own: torch.Tensor,
    is_child: torch.Tensor,
    row: torch.Tensor,
) -> torch.Tensor:
    """What remains of a row's distribution `[B, V]` after its children were tried. Where rounding
    leaves nothing, the whole distribution."""
    final = probs.gather(1, row.unsqueeze(2).expand(-1, 1, probs.shape[2])).squeeze(1)
    was_tried = torch.zeros_like(final).scatter_add_(
        1, tokens, (is_child & (own > 0)).to(final.dtype)
    )
    rest = torch.where(was_tried > 0, 0.0, final)
    return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, final)
