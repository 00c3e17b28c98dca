"""`choose_rows` for draft trees: which nodes of a batch's trees a round verifies. A node's value is
the product of the probabilities on its path, so a node never has a row without its parent.

The chosen nodes come first in their windows, in their order, and so are smaller trees: all that
reads windows takes the first rows of each, as it does of chains. On CUDA Triton kernels, elsewhere
the plain-torch references."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.drafts.draft_beams import DraftTree
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.slots.accept import SlotTables, TreeTables
from tllm_spec.kernels.slots.choose_rows import (
    BRANCH,
    EXPECTED_SCALE,
    MAX_SLOT_NUMBER,
    NUM_FEATURES,
    NUM_WARPS,
    OFFERED,
    OFFERED_ROUNDS,
    PRIOR_DRAFTS,
    SLOT_RATE,
    ChosenRows,
    DraftValues,
    best_drafts,
    choose_kernel,
    expected_drafts,
    features_at,
    features_of,
    follow,
    learn_kernel,
    offered,
    probabilities,
)


def features_of_tree(tree: DraftTree) -> torch.Tensor:
    """The features of its nodes after the root, `[B, W-1]` int32: of their probabilities after
    their parents, or where these are not known of their depths."""
    if tree.scores is None:
        return features_at(tree.depths[:, 1:] - 1)
    before = torch.nn.functional.pad(tree.scores, (1, 0), value=1.0).gather(1, tree.parents[:, 1:])
    return features_of(tree.scores / before)


@with_kernel("choose_nodes_triton", argument=3)
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


@with_kernel("learn_nodes_triton", argument=1)
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


def choose_nodes_triton(
    values: DraftValues,
    tables: SlotTables,
    trees: TreeTables,
    slots: torch.Tensor,
    window: int,
    depth: int,
    num_rows: int,
) -> ChosenRows:
    """See `choose_nodes`."""
    stored = (trees.parents, trees.depths, trees.bits, trees.order)
    assert all(each.stride() == trees.parents.stride() for each in stored)
    batch, length, device = len(slots), window - 1, slots.device
    num_budgets = len(values.budgets)
    node_values = torch.empty(
        (1 + (num_budgets > 0), batch, length), dtype=torch.float32, device=device
    )
    is_chosen = torch.empty((batch, length), dtype=torch.int32, device=device)
    levels = torch.empty_like(is_chosen) if num_budgets else None
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=device)
    num_verified, expected = torch.empty_like(slots), slots.new_empty((batch, num_budgets))
    features = (values.features, values.features.stride(0))
    own = (*features, values.of_feature, values.of_slot, values.num_idle)
    block, launch = triton.next_power_of_2(window), programmatic_launch(device)
    _find_values[(batch, len(node_values))](
        *(*own, trees.parents, trees.depths, trees.parents.stride(0), slots, node_values, levels),
        *(depth, window, block, OFFERED_ROUNDS, OFFERED, BRANCH),
        **launch,
        num_warps=1,
    )
    choose_kernel[(1 + num_budgets,)](
        *(*own, values.budgets, tables.num_drafts, slots, offsets, num_verified, expected),
        *(node_values, levels, is_chosen, batch, num_rows - batch, length, num_budgets, length),
        *(triton.next_power_of_2(batch), triton.next_power_of_2(length)),
        *(OFFERED_ROUNDS, OFFERED, EXPECTED_SCALE, BRANCH),
        **launch,
        num_warps=NUM_WARPS,
    )
    _reorder[(batch,)](
        *(is_chosen, slots, tables.window, tables.window.stride(0), *stored),
        *(trees.parents.stride(0), *features, window, block),
        **launch,
        num_warps=1,  # so that all is read before anything is written
    )
    return ChosenRows(offsets, num_verified, expected)


def learn_nodes_triton(
    values: DraftValues,
    parents: torch.Tensor,
    num_verified: torch.Tensor,
    slots: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """See `learn_nodes`."""
    assert rows.is_contiguous() and parents.stride(1) == 1
    (batch, path), length = rows.shape, values.features.shape[1]
    learn_kernel[(1,)](
        *(values.features, values.features.stride(0), values.of_feature, values.of_slot),
        *(values.num_idle, num_verified, slots, None, parents, parents.stride(0), rows, path),
        *(batch, length, triton.next_power_of_2(batch), triton.next_power_of_2(length)),
        *(NUM_FEATURES, SLOT_RATE, PRIOR_DRAFTS, MAX_SLOT_NUMBER),
        **programmatic_launch(slots.device),
        num_warps=NUM_WARPS,
    )


# fmt: off
@triton.jit(do_not_specialize=["stride", "trees_stride", "limit"])  # type: ignore[untyped-decorator]  # triton has no types
def _find_values(
    features: tl.tensor, stride: tl.tensor, of_feature: tl.tensor, of_slot: tl.tensor,
    num_idle: tl.tensor, parents: tl.tensor, depths: tl.tensor, trees_stride: tl.tensor,
    slots: tl.tensor, node_values: tl.tensor, levels: tl.tensor, limit: tl.tensor,
    width: tl.constexpr, block: tl.constexpr, OFFERED_ROUNDS: tl.constexpr, OFFERED: tl.constexpr,
    BRANCH: tl.constexpr, PDL: tl.constexpr,
) -> None:
    begin(PDL)
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, is_draft = tl.load(slots + request), (node > 0) & (node < width)
    stored = slot * trees_stride + node
    parent = tl.load(parents + stored, mask=is_draft, other=0)
    parent = tl.maximum(parent, 0).to(tl.int32)
    feature = tl.load(features + slot * stride + node - 1, mask=is_draft, other=0)
    number = tl.load(of_feature + feature, mask=is_draft, other=0.0) + tl.load(of_slot + slot)
    is_due = (tl.load(num_idle + slot) >= OFFERED_ROUNDS - 1) & (tl.program_id(1) == 0)
    chance = tl.where(is_due & (node == 1), OFFERED, tl.sigmoid(number))
    chance = tl.where(node == 0, 1.0, chance)
    value = chance
    for _ in range(1, limit):
        value = chance * tl.where(node == 0, 1.0, tl.gather(value, parent, 0))
    places = request * (width - 1) + node - 1
    offset = tl.program_id(1) * tl.num_programs(0) * (width - 1)
    tl.store(node_values + offset + places, value, mask=is_draft)
    if levels is not None:
        is_further = node < 0
        for index in range(1, width):
            other = tl.sum(tl.where(node == index, parent, 0), 0)
            is_further |= (node > index) & (parent == other)
        branches = is_further & is_draft
        for _ in range(1, limit):
            branches |= tl.gather(branches.to(tl.int32), parent, 0) > 0
        level = tl.load(depths + stored, mask=is_draft, other=0).to(tl.int32)
        level += tl.where(branches, BRANCH, 0)
        tl.store(levels + places, level, mask=is_draft)


@triton.jit(do_not_specialize=["window_stride", "trees_stride", "stride"])  # type: ignore[untyped-decorator]  # triton has no types
def _reorder(
    is_chosen: tl.tensor, slots: tl.tensor, windows: tl.tensor, window_stride: tl.tensor,
    all_parents: tl.tensor, all_depths: tl.tensor, all_bits: tl.tensor, order: tl.tensor,
    trees_stride: tl.tensor, features: tl.tensor, stride: tl.tensor, width: tl.constexpr,
    block: tl.constexpr, PDL: tl.constexpr,
) -> None:
    begin(PDL)
    request, node = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, exists = tl.load(slots + request), node < width
    is_draft = exists & (node > 0)
    chosen = tl.load(is_chosen + request * (width - 1) + node - 1, mask=is_draft, other=0)
    is_first = (chosen > 0) | (node == 0)
    is_last = (exists & (is_first == 0)).to(tl.int32)
    num_first = tl.cumsum(is_first.to(tl.int32), 0)
    last = tl.sum(is_first.to(tl.int32), 0) + tl.cumsum(is_last, 0)
    row = tl.where(is_first, num_first, last) - 1
    stored = slot * trees_stride + node
    token = tl.load(windows + slot * window_stride + node, mask=exists, other=0)
    parent = tl.load(all_parents + stored, mask=exists, other=-1)
    depth = tl.load(all_depths + stored, mask=exists, other=0)
    bits = tl.load(all_bits + stored, mask=exists, other=0)
    feature = tl.load(features + slot * stride + node - 1, mask=is_draft, other=0)
    new_parent = tl.gather(row, tl.maximum(parent, 0).to(tl.int32), 0).to(tl.int64)
    new_bits = tl.zeros_like(bits)
    for index in range(width):
        at = tl.sum(tl.where(node == index, row, 0), 0).to(tl.int64)
        new_bits |= ((bits >> index) & 1) << at
    places = slot * trees_stride + row
    tl.store(windows + slot * window_stride + row, token, mask=exists)
    tl.store(all_parents + places, tl.where(parent < 0, -1, new_parent), mask=exists)
    tl.store(all_depths + places, depth, mask=exists)
    tl.store(all_bits + places, new_bits, mask=exists)
    tl.store(order + places, node.to(tl.int64), mask=exists)
    tl.store(features + slot * stride + row - 1, feature, mask=is_draft)
# fmt: on
