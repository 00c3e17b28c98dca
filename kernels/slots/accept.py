"""Acceptance of drafts, in plain torch, the reference of `slot_windows` and `slot_trees`: how many
drafts of a chain, or which path of a tree, equal the target's tokens; and the tables that
change."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# The tables that `slot_windows` and `slot_trees` update.


@dataclass(frozen=True)
class SlotTables:
    """Tables indexed by slot, int64, documented in `SlotState`: kv_lens, num_drafts, previous_token
    `[S]`, window `[S, K_max + 1]`."""

    kv_lens: torch.Tensor
    window: torch.Tensor
    num_drafts: torch.Tensor
    previous_token: torch.Tensor


@dataclass(frozen=True)
class TreeTables:
    """The trees in the slots' windows, `[S, W_max]` int64 each, documented in `DraftTree`."""

    parents: torch.Tensor
    depths: torch.Tensor
    bits: torch.Tensor


@dataclass(frozen=True)
class SyntheticRates:
    """Synthetic acceptance (`accept_by_rates`). seeds `[S]`: of the slots, for the coins, any
    stride."""

    rates: torch.Tensor
    seeds: torch.Tensor


@dataclass(frozen=True)
class TreeRates:
    """Synthetic acceptance of trees (`accept_tree_by_rates`). bounds `[>= D, R]` float64,
    contiguous; seeds as above."""

    bounds: torch.Tensor
    seeds: torch.Tensor


# Acceptance of a chain of drafts: how many draft tokens equal the target's tokens at their
# positions. Plain torch; a part of the reference of `slot_windows`' kernel.


def accept_chain(
    targets: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor | None
) -> torch.Tensor:
    """Emitted tokens per request: accepted drafts plus the target's own, `[B]` int64.

    targets `[B, K+1]`: the target's token after each window position; drafts `[B, K]`; num_drafts
    `[B]`: how many of the drafts were proposed (None: all). The emitted tokens are
    `targets[b, :new_lens[b]]`, because an accepted draft equals the target's token."""
    matches = targets[:, :-1] == drafts
    if num_drafts is not None:
        matches &= torch.arange(drafts.shape[1], device=drafts.device) < num_drafts.unsqueeze(1)
    return matches.cumprod(dim=1).sum(dim=1) + 1


def accept_by_rates(
    targets: torch.Tensor,
    drafts: torch.Tensor,
    num_drafts: torch.Tensor,
    rates: torch.Tensor,
    coins: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Synthetic acceptance by chance. Returns the emitted tokens `[B, K+1]` (accepted drafts, then
    the target's token) and their numbers `[B]`.

    rates `[>= K]` float64: rate i is the probability that drafts 0..i are all accepted; rates do
    not rise. coins `[B]` float64 in (0, 1), one per round: draft i is accepted if the coin is below
    rate i."""
    length = drafts.shape[1]
    accepted = torch.minimum((coins.unsqueeze(1) < rates[:length]).sum(dim=1), num_drafts)
    is_draft = torch.arange(length, device=drafts.device) < accepted.unsqueeze(1)
    tokens = torch.cat((torch.where(is_draft, drafts, targets[:, :-1]), targets[:, -1:]), dim=1)
    return tokens, accepted + 1


# Acceptance of a tree of drafts: the path from the root along which each draft equals the target's
# token. Plain torch; a part of the reference of `slot_trees`' kernel.
#
# `parents` `[B, W]` is int64 with -1 for the root, a parent before its children; a layout's
# parents may be expanded to it. num_drafts `[B]`: how many drafts were proposed, the nodes from 1
# on; the rest is padding. None: all. `depth` (D): drafts on the longest path, at most.


Accepted = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def accept_tree(
    targets: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
    num_drafts: torch.Tensor | None = None,
) -> Accepted:
    """targets `[B, W]`: the target's token after each node; tokens `[B, W]`: of the nodes.

    Returns the accepted rows `[B, D+1]`, from the root on, padded with the last one; the emitted
    tokens `[B, D+1]` (accepted drafts, then the target's token), padded with the last one; and
    their numbers `[B]`. All int64. A target of -1 equals no token, so it ends its path and is
    emitted. Of several equal children the first is accepted."""
    is_open = tokens == targets.gather(1, parents.clamp_min(0))
    rows, lens = descend(is_open & _is_proposed(parents, num_drafts), parents, depth)
    return rows, targets.gather(1, rows), lens


def descend(
    is_open: torch.Tensor, parents: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The path from the root to the first open child, and so on. is_open `[B, W]` bool. Returns
    rows `[B, D+1]`, padded with the last one, and their numbers `[B]`."""
    batch, width = parents.shape
    nodes = torch.arange(width, device=parents.device)
    row = torch.zeros((batch, 1), dtype=torch.int64, device=parents.device)
    rows, lens = [row], torch.ones_like(row[:, 0])
    for _ in range(depth):
        next_row = torch.where(is_open & (parents == row), nodes, width).amin(dim=1, keepdim=True)
        lens = lens + (next_row < width).squeeze(1)
        row = torch.where(next_row < width, next_row, row)
        rows.append(row)
    return torch.cat(rows, dim=1), lens


def accept_tree_by_rates(
    targets: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
    num_drafts: torch.Tensor | None,
    bounds: torch.Tensor,
    coins: torch.Tensor,
) -> Accepted:
    """Synthetic acceptance by chance. Arguments and results as `accept_tree`.

    bounds `[>= D, R]` float64, rising in a row to at most 1: bounds[d, r] is the probability that a
    path of d drafts continues to one of its last node's first r + 1 children (in node order). coins
    `[B]` float64 in (0, 1), one per round. A path ends where the chosen child does not exist."""
    width, num_ranks = tokens.shape[1], bounds.shape[1]
    nodes = torch.arange(width, device=parents.device)
    lower = F.pad(bounds[:, :-1], (1, 0))
    row, coin = torch.zeros_like(parents[:, :1]), coins.unsqueeze(1)
    rows, lens, going = [row], torch.ones_like(row), torch.ones_like(row, dtype=torch.bool)
    for step in range(depth):
        rank = (coin >= bounds[step]).sum(dim=1, keepdim=True)  # R if the path ends
        column = rank.clamp_max(num_ranks - 1)
        is_child = (parents == row) & _is_proposed(parents, num_drafts)
        is_next = is_child & (is_child.cumsum(dim=1) == rank + 1) & (rank < num_ranks)
        next_row = torch.where(is_next, nodes, width).amin(dim=1, keepdim=True)
        going = going & (next_row < width)
        lens = lens + going
        row = torch.where(going, next_row, row)
        # Within the interval of its rank the coin is uniform again.
        coin = (coin - lower[step][column]) / (bounds[step][column] - lower[step][column])
        rows.append(row)
    path = torch.cat(rows, dim=1)
    is_draft = torch.arange(depth + 1, device=parents.device) < lens - 1
    next_draft = tokens.gather(1, path.roll(-1, dims=1))
    return path, torch.where(is_draft, next_draft, targets.gather(1, path)), lens.squeeze(1)


def _is_proposed(parents: torch.Tensor, num_drafts: torch.Tensor | None) -> torch.Tensor:
    """Whether each node is a draft that was proposed, `[B, W]` bool."""
    if num_drafts is None:
        return parents >= 0
    nodes = torch.arange(parents.shape[1], device=parents.device)
    return (parents >= 0) & (nodes <= num_drafts.unsqueeze(1))
