"""Acceptance of a tree of drafts: the path from the root along which each draft equals the target's
token. Plain torch; a part of the reference of `slot_trees`' kernel.

`parents` `[B, W]` is int64 with -1 for the root, a parent before its children; a layout's parents
may be expanded to it. num_drafts `[B]`: how many drafts were proposed, the nodes from 1 on; the
rest is padding. None: all. `depth` (D): drafts on the longest path, at most."""

import torch
import torch.nn.functional as F

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
