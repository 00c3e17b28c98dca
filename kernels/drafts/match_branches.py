"""Draft trees of a network with the match of the text's end as one more branch: of the candidates
of both, the likeliest are the tree. On CUDA a Triton kernel, elsewhere the plain-torch reference.

A match's draft counts as accepted as often as drafts in its place after matches of that length
were; a network's, by its own probability. A node that both have counts once, with the higher one.
No node counts more than its parent, and equal ones go to the lower index, where the parent is, so a
chosen node's parent is always chosen."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.drafts.draft_sources import MATCH, PRIOR, DraftSources, await_drafts
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.slots.accept import DraftTree

CERTAIN = 2.0  # above every probability: of a match of the threshold


@with_kernel("add_match_triton", argument=1)
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
    assert tree.scores is not None and tree.num_drafts is None
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
    is_draft = torch.arange(depth, device=match.device) < lens.unsqueeze(1)
    await_drafts(sources, slots, best_path, match.where(is_draft, -1))
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
        parents=own_parents.masked_fill(numbers == 0, -1),
        depths=depths.gather(1, chosen),
        bits=bits,
    )


def add_match_triton(
    sources: DraftSources,
    slots: torch.Tensor,
    tree: DraftTree,
    match: torch.Tensor,
    lens: torch.Tensor,
    lengths: torch.Tensor,
    learns: bool,
) -> DraftTree:
    """See `add_match`."""
    rows = (tree.parents, tree.depths, tree.bits)
    assert tree.scores is not None and tree.num_drafts is None
    assert all(each.is_contiguous() for each in (slots, tree.tokens, tree.scores, match, lens))
    assert all(each.stride() == tree.parents.stride() for each in rows)
    assert tree.parents.stride(1) == 1
    (batch, num_nodes), depth = tree.tokens.shape, match.shape[1]
    assert depth <= num_nodes < 64
    tokens = torch.empty_like(tree.tokens)
    new_rows = match.new_empty((3, batch, num_nodes + 1)).unbind()
    num_classes, max_draft_len = len(sources.takes_match), sources.pending.shape[2]
    block = triton.next_power_of_2(num_nodes + 1 + depth)
    _add[(batch,)](
        sources.pending,
        sources.choices,
        sources.counts,
        sources.priors,
        slots,
        tree.tokens,
        tree.scores,
        *rows,
        tree.parents.stride(0),
        match,
        lens,
        lengths,
        tokens,
        *new_rows,
        num_classes,
        num_nodes,
        depth,
        max_draft_len,
        learns,
        CERTAIN,
        PRIOR,
        block,
        **programmatic_launch(slots.device),
        num_warps=max(1, block // 8),  # of a table `[block, block]`, up to 32 elements a thread
    )
    return DraftTree(tokens, parents=new_rows[0], depths=new_rows[1], bits=new_rows[2])


@triton.jit(do_not_specialize=["num_classes"])
def _add(
    pending: tl.tensor, choices: tl.tensor, counts: tl.tensor, priors: tl.tensor, slots: tl.tensor,
    tokens: tl.tensor, scores: tl.tensor, parents: tl.tensor, depths: tl.tensor,
    all_bits: tl.tensor, rows_stride: tl.tensor, match: tl.tensor, lens: tl.tensor,
    lengths: tl.tensor, new_tokens: tl.tensor, new_parents: tl.tensor, new_depths: tl.tensor,
    new_bits: tl.tensor, num_classes: tl.tensor, num_nodes: tl.constexpr, max_depth: tl.constexpr,
    max_draft_len: tl.constexpr, learns: tl.constexpr, certain: tl.constexpr, prior: tl.constexpr,
    block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Node 0 is the root, then come the tree's, and node num_nodes + n is the match's at depth n,
    unless the tree has it. A score below -1 stands for no node."""
    begin(PDL)
    request, own = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, num_drafts = tl.load(slots + request), tl.load(lens + request)
    own_class = tl.minimum(tl.load(lengths + request), num_classes - 1)
    num_taken = num_drafts if learns else tl.where(own_class == num_classes - 1, num_drafts, 0)
    is_tree, is_node = own <= num_nodes, (own > 0) & (own <= num_nodes)
    at = request * num_nodes + own - 1
    token = tl.load(tokens + at, mask=is_node, other=-1)
    score = tl.load(scores + at, mask=is_node, other=-2.0)
    score = tl.where(own == 0, certain, tl.where(score != score, -1.0, score))
    at = request * rows_stride + own
    parent = tl.load(parents + at, mask=is_tree, other=-1).to(tl.int32)
    depth = tl.load(depths + at, mask=is_tree, other=0).to(tl.int32)
    bits = tl.load(all_bits + at, mask=is_tree, other=0)
    cell = counts + (own_class * 2 + 1) * (2 * max_draft_len)
    match_prior = tl.load(priors + own_class * 2 + 1)
    chance = match_prior * 0 + (1.0 if learns else certain)
    node = own_class.to(tl.int32) * 0
    match, latest = match + request * max_depth, pending + slot * (2 * max_draft_len)
    _await_block(latest, own, token, parent, node, match, num_drafts, max_draft_len)
    for step in range(max_depth):
        drafted = tl.load(match + step)
        is_same = is_node & (parent == node) & (token == drafted)
        there = tl.max(tl.where(is_same, own, 0), axis=0)
        place = tl.where(there > 0, there, num_nodes + 1 + step)
        if learns:
            tried, right = tl.load(cell + 2 * step), tl.load(cell + 2 * step + 1)
            chance *= tl.div_rn(right + match_prior, tried.to(tl.float32) + prior)
        is_place = (own == place) & (step < num_taken)
        is_new = is_place & (there == 0)
        score = tl.where(is_place, tl.maximum(score, chance), score)
        path_bits = tl.sum(tl.where(own == node, bits, 0), axis=0)
        token, parent = tl.where(is_new, drafted, token), tl.where(is_new, node, parent)
        depth, bits = tl.where(is_new, step + 1, depth), tl.where(is_new, path_bits, bits)
        node = tl.where(step < num_taken, place, node)
    is_chosen = tl.sum(_is_before(-score, own).to(tl.int32), axis=1) <= num_nodes
    is_added = (own > num_nodes) & (score > -2.0)
    # The match's nodes have the bits of the node that they branch off from.
    is_above = is_tree[None, :] & (((bits[:, None] >> own[None, :].to(tl.int64)) & 1) > 0)
    is_above |= is_added[:, None] & is_added[None, :] & (own[None, :] <= own[:, None])
    tl.store(choices + slot * 2, own_class.to(tl.int32))
    tl.store(choices + slot * 2 + 1, tl.max((is_chosen & is_added).to(tl.int32), axis=0))
    row, parent_row, row_bits = _numbered(own, parent, depth, is_chosen, is_above)
    at = request * (num_nodes + 1) + row
    tl.store(new_tokens + request * num_nodes + row - 1, token, mask=is_chosen & (own > 0))
    tl.store(new_parents + at, parent_row.to(tl.int64), mask=is_chosen)
    tl.store(new_depths + at, depth.to(tl.int64), mask=is_chosen)
    tl.store(new_bits + at, row_bits, mask=is_chosen)


@triton.jit
def _await_block(
    pending: tl.tensor, own: tl.tensor, token: tl.tensor, parent: tl.tensor, node: tl.tensor,
    match: tl.tensor, num_drafts: tl.tensor, max_draft_len: tl.constexpr,
) -> None:  # fmt: skip
    """Stores each first child's token from `node`, the root, on, and the match's drafts; -1 after
    the end of either."""
    for step in range(max_draft_len):
        node = tl.min(tl.where(parent == node, own, own.shape[0]), axis=0)
        of_network = tl.max(tl.where(own == node, token, -1), axis=0)
        tl.store(pending + step, of_network.to(tl.int32))
        of_match = tl.load(match + step, mask=step < num_drafts, other=-1)
        tl.store(pending + max_draft_len + step, of_match.to(tl.int32))


@triton.jit
def _is_before(keys: tl.tensor, own: tl.tensor) -> tl.tensor:
    """Whether each column's key is less than each row's; equal ones are in order."""
    equal = (keys[None, :] == keys[:, None]) & (own[None, :] < own[:, None])
    return (keys[None, :] < keys[:, None]) | equal


@triton.jit
def _numbered(
    own: tl.tensor, parent: tl.tensor, depth: tl.tensor, is_chosen: tl.tensor, is_above: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """The rows of chosen nodes, by depth, those of their parents, and of all above as bits."""
    row = tl.sum((_is_before(depth, own) & is_chosen[None, :]).to(tl.int32), axis=1)
    parent_row = tl.sum(tl.where(parent[:, None] == own[None, :], row[None, :], 0), axis=1)
    row_bits = tl.full([own.shape[0]], 1, tl.int64) << row.to(tl.int64)
    above = tl.sum(tl.where(is_above, row_bits[None, :], 0), axis=1)
    return row, tl.where(own > 0, parent_row, -1), above
