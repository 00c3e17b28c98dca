"""`choose_nodes` and `learn_nodes` as Triton kernels: a program for each request finds its nodes'
values, one chooses among all, and again one for each request puts the nodes in order. Importing
this file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.choose_rows import (
    BRANCH,
    EXPECTED_SCALE,
    MAX_SLOT_NUMBER,
    NUM_FEATURES,
    OFFERED,
    OFFERED_ROUNDS,
    PRIOR_DRAFTS,
    SLOT_RATE,
    ChosenRows,
    DraftValues,
)
from tllm_spec.kernels.choose_rows_triton import (
    NUM_WARPS,
    choose_kernel,
    learn_kernel,
)
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.slot_tables import SlotTables, TreeTables


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
