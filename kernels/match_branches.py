"""Draft trees of a network with the match of the text's end as one more branch: of the candidates
of both, the likeliest are the tree. On CUDA a Triton kernel, elsewhere the plain-torch reference.

A match's draft counts as accepted as often as drafts in its place after matches of that length
were; a network's, by its own probability. A node that both have counts once, with the higher one.
No node counts more than its parent, and equal ones go to the lower index, where the parent is, so a
chosen node's parent is always chosen."""

import torch

from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.draft_sources import MATCH, PRIOR, DraftSources

CERTAIN = 2.0  # above every probability: of a match of the threshold


@with_kernel("match_branches_triton.add_match_triton", argument=1)
def add_match(
    sources: DraftSources,
    slots: torch.Tensor,
    tree: DraftTree,
    match: torch.Tensor,
    lens: torch.Tensor,
    lengths: torch.Tensor,
    learns: bool,
) -> DraftTree:
    """The trees of slots `[B]`, of as many nodes as `tree` has. The match's drafts and the
    network's most probable path become pending; a slot's choice is MATCH where the tree has a node
    that the network's has not.

    Args:
        tree: with `scores`; siblings have distinct tokens.
        match: `[B, D]` int64, contiguous; the tree has at most the depth D.
        lens: `[B]` int64, contiguous: drafts of the match; 0: there is none.
        lengths: `[B]` int64, contiguous: tokens of the match.
        learns: False: a match of the last class is certain, and others are left out."""
    assert tree.scores is not None and tree.num_nodes is None
    (batch, num_nodes), depth = tree.tokens.shape, match.shape[1]
    last_class = len(sources.takes_match) - 1
    classes = lengths.clamp_max(last_class)
    taken_lens = lens if learns else lens * (classes == last_class)
    chances = _chances(sources, classes, depth, learns)
    best_path = _first_children(tree, depth)
    # The root, the tree's nodes, and the match's that are not among them.
    root = match.new_full((batch, 1), -1)
    tokens = torch.cat((root, tree.tokens, match), dim=1)
    parents = torch.nn.functional.pad(tree.parents, (0, depth))
    new_depths = torch.arange(1, depth + 1, device=match.device).expand(batch, depth)
    depths = torch.cat((tree.depths, new_depths), dim=1)
    scores = torch.nn.functional.pad(tree.scores.nan_to_num(nan=-1.0), (1, 0), value=CERTAIN)
    scores = torch.nn.functional.pad(scores, (0, depth), value=-2.0)
    node, width = torch.zeros_like(root), num_nodes + 1
    for step in range(depth):
        is_on = step < taken_lens.unsqueeze(1)
        is_same = (tree.parents == node) & (tokens[:, :width] == match[:, step : step + 1])
        is_there = is_same.any(dim=1, keepdim=True)
        place = is_same.to(torch.int64).argmax(dim=1, keepdim=True)
        place = torch.where(is_there, place, width + step)
        score = torch.maximum(scores.gather(1, place), chances[:, step : step + 1])
        scores.scatter_(1, place, torch.where(is_on, score, scores.gather(1, place)))
        parents.scatter_(1, place, torch.where(is_there, parents.gather(1, place), node))
        node = torch.where(is_on, place, node)
    best = scores.sort(dim=1, descending=True, stable=True).indices[:, :width].sort(dim=1).values
    by_depth = depths.gather(1, best).sort(dim=1, stable=True).indices
    chosen = best.gather(1, by_depth)
    has_branch = (chosen >= width).any(dim=1)
    sources.choices[slots] = torch.stack((classes, has_branch), dim=1).to(torch.int32)
    _await(sources, slots, best_path, match, lens)
    return _tree_of(chosen, tokens, parents, depths, depth)


def _chances(
    sources: DraftSources, classes: torch.Tensor, depth: int, learns: bool
) -> torch.Tensor:
    """How likely each of a match's drafts is accepted, `[B, D]` float32, with those before it."""
    if not learns:
        return torch.full((len(classes), depth), CERTAIN, device=classes.device)
    tried, right = sources.counts[classes, MATCH, :depth].to(torch.float32).unbind(-1)
    priors = sources.priors[classes, MATCH].unsqueeze(1)
    return ((right + priors) / (tried + PRIOR)).cumprod(1)


def _first_children(tree: DraftTree, depth: int) -> torch.Tensor:
    """The tokens of each node's first child, from the root on, `[B, D]`; -1 after the end."""
    width = tree.parents.shape[1]
    nodes = torch.arange(width, device=tree.parents.device)
    tokens = torch.nn.functional.pad(tree.tokens, (0, 1), value=-1)
    node, path = torch.zeros_like(tree.parents[:, :1]), []
    for _ in range(depth):
        node = torch.where(tree.parents == node, nodes, width).amin(dim=1, keepdim=True)
        path.append(tokens.gather(1, node - 1))
    return torch.cat(path, dim=1)


def _await(
    sources: DraftSources,
    slots: torch.Tensor,
    network: torch.Tensor,
    match: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    depth = match.shape[1]
    is_draft = torch.arange(depth, device=match.device) < lens.unsqueeze(1)
    both = torch.stack((network, match.where(is_draft, -1)), dim=1)
    sources.pending[slots, :, :depth] = both.to(torch.int32)
    sources.pending[slots, :, depth:] = -1


def _tree_of(
    chosen: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    depth: int,
) -> DraftTree:
    """The tree of the chosen nodes `[B, W]`, by their new numbers."""
    numbers = torch.arange(chosen.shape[1], device=chosen.device).expand_as(chosen)
    rows = torch.zeros_like(tokens).scatter(1, chosen, numbers)
    own_parents = rows.gather(1, parents.gather(1, chosen).clamp_min(0))
    own_bits = (torch.ones_like(numbers) << numbers) | 1
    bits = own_bits
    for _ in range(depth - 1):
        bits = own_bits | bits.gather(1, own_parents)
    return DraftTree(
        tokens.gather(1, chosen[:, 1:]),
        own_parents.masked_fill(numbers == 0, -1),
        depths.gather(1, chosen),
        bits,
    )
