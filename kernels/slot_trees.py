"""`slot_windows` for windows that are draft trees: accept a path of drafts and advance the slots,
and write new trees. On CUDA one Triton kernel each, elsewhere the plain-torch references."""

import torch

from tllm_spec.kernels.accept_tree import Accepted, accept_tree, accept_tree_by_rates
from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.gumbel import COIN_DOMAIN, uniform
from tllm_spec.kernels.slot_tables import SlotTables, TreeRates, TreeTables
from tllm_spec.kernels.slot_windows import advance


@with_kernel("slot_trees_triton.accept_trees_triton", argument=1)
def accept_trees(
    tables: SlotTables,
    parents: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    targets: torch.Tensor,
    depth: int,
    synthetic: TreeRates | None = None,
) -> Accepted:
    """Accepts paths in the windows of slots `[B]` and advances these slots.

    Args:
        parents: `[S, >= W]` int64 by slot, any stride between rows: -1 for the root, a parent
            before its children. A layout that all slots have is expanded.
        kv_lens: `[B]` int64: of these slots.
        targets: `[B, W]` int64, contiguous: the target's token after each node.
        depth: D, drafts on the longest path, at most.

    Returns accepted rows `[B, D+1]`, emitted tokens `[B, D+1]` and their numbers `[B]`, see
    `accept_tree`. Row r of request b is row `b * W + r` of the round. Duplicate slots (padding)
    keep one of their results."""
    width = targets.shape[1]
    tokens = tables.window.index_select(0, slots)[:, :width]
    tree = (
        parents.index_select(0, slots)[:, :width],
        depth,
        tables.num_drafts.index_select(0, slots),
    )
    if synthetic is None:
        accepted = accept_tree(targets, tokens, *tree)
    else:
        coins = uniform(synthetic.seeds.index_select(0, slots), kv_lens + 1, COIN_DOMAIN)
        accepted = accept_tree_by_rates(targets, tokens, *tree, synthetic.bounds, coins)
    advance(tables, slots, kv_lens, *accepted[1:])
    return accepted


@with_kernel("slot_trees_triton.write_trees_triton", argument=2)
def write_trees(
    tables: SlotTables,
    trees: TreeTables,
    slots: torch.Tensor,
    tree: DraftTree,
    draft_limits: torch.Tensor,
) -> None:
    """Writes trees whose nodes are ordered by depth into the windows of slots `[B]`. Rows after the
    tree's stay as they are.

    The tree's rows may be one layout, expanded. draft_limits `[S]` int64: the depth of the deepest
    draft that a slot may verify; deeper ones do not count as proposed."""
    width = tree.parents.shape[1]
    tables.window[slots, 1:width] = tree.tokens
    trees.parents[slots, :width] = tree.parents
    trees.depths[slots, :width] = tree.depths
    trees.bits[slots, :width] = tree.bits
    is_proposed = tree.depths[:, 1:] <= draft_limits.index_select(0, slots).unsqueeze(1)
    if tree.num_nodes is not None:
        is_proposed &= torch.arange(width - 1, device=slots.device) < tree.num_nodes.unsqueeze(1)
    tables.num_drafts[slots] = is_proposed.sum(dim=1)
