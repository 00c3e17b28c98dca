"""`choose_rows` for draft trees: which nodes of a batch's trees a round verifies. A node's value is
the product of the probabilities on its path, so a node never has a row without its parent.

The chosen nodes come first in their windows, in their order, and so are smaller trees: all that
reads windows takes the first rows of each, as it does of chains. On CUDA Triton kernels, elsewhere
the plain-torch references."""

import torch

from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.choose_rows import (
    BRANCH,
    ChosenRows,
    DraftValues,
    best_drafts,
    expected_drafts,
    features_at,
    features_of,
    follow,
    offered,
    probabilities,
)
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.slot_tables import SlotTables, TreeTables


def features_of_tree(tree: DraftTree) -> torch.Tensor:
    """The features of its nodes after the root, `[B, W-1]` int32: of their probabilities after
    their parents, or where these are not known of their depths."""
    if tree.scores is None:
        return features_at(tree.depths[:, 1:] - 1)
    before = torch.nn.functional.pad(tree.scores, (1, 0), value=1.0).gather(1, tree.parents[:, 1:])
    return features_of(tree.scores / before)


@with_kernel("choose_nodes_triton.choose_nodes_triton", argument=3)
def choose_nodes(
    values: DraftValues,
    tables: SlotTables,
    trees: TreeTables,
    slots: torch.Tensor,
    window: int,
    depth: int,
    num_rows: int,
) -> ChosenRows:
    """As `choose_rows`, for trees of `depth` at most in the windows of slots `[B]`, whose features,
    tokens and trees are put into the new order. `expected` counts the drafts before the choice."""
    parents = trees.parents.index_select(0, slots)[:, :window]
    num_drafts = tables.num_drafts.index_select(0, slots)
    chances = probabilities(values, slots)[:, : window - 1]
    levels = levels_of(trees.depths.index_select(0, slots)[:, :window], parents, depth)
    expected = expected_drafts(values, node_values(chances, parents, depth), num_drafts, levels)
    worth = node_values(offered(values, slots, chances), parents, depth)
    number = num_rows - len(slots)
    is_chosen = best_drafts(worth, num_drafts, window - 1, number, pads=True)
    reorder(values, tables, trees, slots, is_chosen)
    counts = is_chosen.sum(1)
    ends = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0))
    return ChosenRows(ends.to(torch.int32), torch.minimum(num_drafts, counts), expected)


def node_values(chances: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
    """The products of `chances` `[B, W-1]` on the path to each node; parents `[B, W]`."""
    values, parents = torch.nn.functional.pad(chances, (1, 0), value=1.0), parents.clamp_min(0)
    for _ in range(depth - 1):
        values[:, 1:] = chances * values.gather(1, parents)[:, 1:]
    return values[:, 1:]


def levels_of(depths: torch.Tensor, parents: torch.Tensor, depth: int) -> torch.Tensor:
    """The depths of nodes, `[B, W-1]`, to which BRANCH is added where a node on the path is not the
    first child; depths, parents `[B, W]`."""
    own = parents[:, 1:]
    has_sibling_before = (own.unsqueeze(2) == own.unsqueeze(1)).tril(-1).any(2)
    is_first = node_values((~has_sibling_before).to(torch.float32), parents, depth)
    return depths[:, 1:] + BRANCH * (is_first == 0)


def reorder(
    values: DraftValues,
    tables: SlotTables,
    trees: TreeTables,
    slots: torch.Tensor,
    is_chosen: torch.Tensor,
) -> None:
    """Puts the chosen nodes `[B, W-1]` of slots `[B]` first in their windows, the others after
    them. `trees.order` has the node that was at each row."""
    is_last = torch.nn.functional.pad(~is_chosen, (1, 0))
    width = is_last.shape[1]
    order = is_last.to(torch.int32).sort(dim=1, stable=True).indices  # [B, W]: node of each row
    rows = order.argsort(1)
    own = [each.index_select(0, slots)[:, :width] for each in vars(trees).values()]
    parents, depths, bits, _ = own
    parents = torch.where(parents < 0, -1, rows.gather(1, parents.clamp_min(0)))
    sees = (bits.unsqueeze(2) >> torch.arange(width, device=slots.device)) & 1
    bits = (sees << rows.unsqueeze(1)).sum(2)
    tokens = tables.window.index_select(0, slots)[:, :width]
    for table, each in zip(
        (trees.parents, trees.depths, trees.bits, tables.window),
        (parents, depths, bits, tokens),
        strict=True,
    ):
        table[slots, :width] = each.gather(1, order)
    trees.order[slots, :width] = order
    features = values.features.index_select(0, slots)[:, : width - 1]
    values.features[slots, : width - 1] = features.gather(1, order[:, 1:] - 1)


@with_kernel("choose_nodes_triton.learn_nodes_triton", argument=1)
def learn_nodes(
    values: DraftValues,
    parents: torch.Tensor,
    num_verified: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """As `learn_values`, for trees: slots `[B]` have verified num_verified `[B]` nodes and accepted
    those in rows `[B, D+1]`, the root among them. parents `[S, W]`: by slot. Any child of an
    accepted node says something: at most one is the target's token."""
    number = values.features.shape[1]
    is_on_path = torch.zeros((len(slots), number + 1), dtype=torch.bool, device=slots.device)
    is_on_path.scatter_(1, rows, True)
    own = parents.index_select(0, slots)[:, 1 : number + 1]
    is_seen = is_on_path.gather(1, own.clamp_min(0)) & (own >= 0)
    is_seen &= torch.arange(number, device=slots.device) < num_verified.unsqueeze(1)
    follow(values, slots, num_verified, is_seen, is_on_path[:, 1:])
