"""What slots hold of their windows, drafts, and which of them are accepted: in plain torch, the
reference of `slot_windows`. A chain is a tree in which each row continues the one before, so its
layout is not written down: `parents` is None."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class TreeTables:
    """The trees in the slots' windows, `[S, W_max]` int64 each, documented in `DraftTree`."""

    parents: torch.Tensor
    depths: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True)
class SlotTables:
    """Tables indexed by slot, int64, documented in `SlotState`: kv_lens, num_drafts, previous_token
    `[S]`, window `[S, K_max + 1]`. trees: None where all drafts are chains."""

    kv_lens: torch.Tensor
    window: torch.Tensor
    num_drafts: torch.Tensor
    previous_token: torch.Tensor
    trees: TreeTables | None = None


@dataclass(frozen=True)
class Drafts:
    """Drafts `tokens` `[B, W-1]` int64 of B requests: chains, or a `DraftTree`. num_drafts `[B]`
    int64: how many of them each request really has; None: all. likely `[B, W-1]`: the drafter's own
    probabilities of a chain's drafts; None: not known."""

    tokens: torch.Tensor
    num_drafts: torch.Tensor | None = None
    likely: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class DraftTree(Drafts):
    """Drafts with branches, of nodes 1 to W-1. Node 0 is the root, and nodes are ordered by
    depth."""

    parents: torch.Tensor
    """`[B, W]` int64; -1 for the root."""
    depths: torch.Tensor
    """`[B, W]` int64."""
    bits: torch.Tensor
    """`[B, W]` int64: bit j of node r: r is j or descends from j."""
    scores: torch.Tensor | None = None
    """`[B, W-1]` float32: products of probabilities up to each of the nodes 1 to W-1; None: they
    were not asked for."""


@dataclass(frozen=True)
class SyntheticRates:
    """Synthetic acceptance (`accept_by_rates`). bounds `[>= D, R]` float64, contiguous; seeds
    `[S]`: of the slots, for the coins, any stride."""

    bounds: torch.Tensor
    seeds: torch.Tensor


class Accepted(NamedTuple):
    """What B requests emit: the first `lens` `[B]` of `tokens` `[B, D+1]`, accepted drafts and then
    the target's token. What follows counts for nothing. `rows` `[B, D+1]`: of trees, the rows of
    the window that they come after, padded with the last one; None: of chains, one after the
    other. All int64."""

    tokens: torch.Tensor
    lens: torch.Tensor
    rows: torch.Tensor | None = None


# In what follows parents `[B, W]` is int64 with -1 for the root, a parent before its children; a
# layout's parents may be expanded to it. None: chains. num_drafts `[B]`: how many drafts were
# proposed, the nodes from 1 on; the rest is padding. None: all. `depth` (D): drafts on the longest
# path, at most.


def accept_path(
    targets: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor | None,
    depth: int,
    num_drafts: torch.Tensor | None = None,
) -> Accepted:
    """The path from the root along which each draft equals the target's token.

    targets `[B, W]`: the target's token after each node; tokens `[B, W]`: of the nodes. A target of
    -1 equals no token, so it ends its path and is emitted. Of several equal children the first is
    accepted."""
    if parents is None:
        before = targets.roll(1, dims=1)
    else:
        before = targets.gather(1, parents.clamp_min(0))
    is_open = (tokens == before) & _is_proposed(tokens, parents, num_drafts)
    rows, lens = descend(is_open, parents, depth)
    return Accepted(targets.gather(1, rows), lens, rows)


def descend(
    is_open: torch.Tensor, parents: torch.Tensor | None, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The path from the root to the first open child, and so on. is_open `[B, W]` bool. Returns
    rows `[B, D+1]`, padded with the last one, and their numbers `[B]`."""
    batch, width = is_open.shape
    nodes = torch.arange(width, device=is_open.device)
    if parents is None:
        num_accepted = is_open[:, 1 : depth + 1].cumprod(dim=1).sum(dim=1)
        return nodes[: depth + 1].minimum(num_accepted.unsqueeze(1)), num_accepted + 1
    row = torch.zeros((batch, 1), dtype=torch.int64, device=parents.device)
    rows, lens = [row], torch.ones_like(row[:, 0])
    for _ in range(depth):
        next_row = torch.where(is_open & (parents == row), nodes, width).amin(dim=1, keepdim=True)
        lens = lens + (next_row < width).squeeze(1)
        row = torch.where(next_row < width, next_row, row)
        rows.append(row)
    return torch.cat(rows, dim=1), lens


def accept_by_rates(
    targets: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor | None,
    depth: int,
    num_drafts: torch.Tensor | None,
    bounds: torch.Tensor,
    coins: torch.Tensor,
) -> Accepted:
    """Synthetic acceptance by chance. Arguments and results as `accept_path`.

    bounds `[>= D, R]` float64, rising in a row to at most 1: bounds[d, r] is the probability that a
    path of d drafts continues to one of its last node's first r + 1 children (in node order). coins
    `[B]` float64 in (0, 1), one per round. A path ends where the chosen child does not exist."""
    width, num_ranks = tokens.shape[1], bounds.shape[1]
    nodes = torch.arange(width, device=tokens.device)
    is_proposed = _is_proposed(tokens, parents, num_drafts)
    parents = (nodes - 1).expand_as(tokens) if parents is None else parents
    lower = F.pad(bounds[:, :-1], (1, 0))
    row, coin = torch.zeros_like(parents[:, :1]), coins.unsqueeze(1)
    rows, lens, going = [row], torch.ones_like(row), torch.ones_like(row, dtype=torch.bool)
    for step in range(depth):
        rank = (coin >= bounds[step]).sum(dim=1, keepdim=True)  # R if the path ends
        column = rank.clamp_max(num_ranks - 1)
        is_child = (parents == row) & is_proposed
        is_next = is_child & (is_child.cumsum(dim=1) == rank + 1) & (rank < num_ranks)
        next_row = torch.where(is_next, nodes, width).amin(dim=1, keepdim=True)
        going = going & (next_row < width)
        lens = lens + going
        row = torch.where(going, next_row, row)
        # Within the interval of its rank the coin is uniform again.
        coin = (coin - lower[step][column]) / (bounds[step][column] - lower[step][column])
        rows.append(row)
    path = torch.cat(rows, dim=1)
    is_draft = torch.arange(depth + 1, device=tokens.device) < lens - 1
    next_draft = tokens.gather(1, path.roll(-1, dims=1))
    emitted = torch.where(is_draft, next_draft, targets.gather(1, path))
    return Accepted(emitted, lens.squeeze(1), path)


def _is_proposed(
    tokens: torch.Tensor, parents: torch.Tensor | None, num_drafts: torch.Tensor | None
) -> torch.Tensor:
    """Whether each node is a draft that was proposed, `[B, W]` bool."""
    nodes = torch.arange(tokens.shape[1], device=tokens.device)
    is_draft = nodes > 0 if parents is None else parents >= 0
    return is_draft if num_drafts is None else is_draft & (nodes <= num_drafts.unsqueeze(1))
