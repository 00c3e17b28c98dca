"""`choose_rows` and `learn_values` as Triton kernels of one program each; those of trees use them,
too. Importing this file imports Triton.

The program holds B * K values, some thousands at most. It finds the lowest value that still has a
row by halving the interval of all float32 numbers, whose bits ascend as they do."""

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
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin

NUM_WARPS = 8


def choose_rows_triton(
    values: DraftValues, num_drafts: torch.Tensor, slots: torch.Tensor, window: int, num_rows: int
) -> ChosenRows:
    """See `choose_rows`."""
    batch, length, num_budgets = len(slots), values.features.shape[1], len(values.budgets)
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=slots.device)
    num_verified = torch.empty_like(slots)
    expected = slots.new_empty((batch, num_budgets))
    choose_kernel[(1 + num_budgets,)](
        *(values.features, values.features.stride(0), values.of_feature, values.of_slot),
        *(values.num_idle, values.budgets, num_drafts, slots, offsets, num_verified, expected),
        *(None, None, None),
        *(batch, num_rows - batch, window - 1, num_budgets),
        length,
        triton.next_power_of_2(batch),
        triton.next_power_of_2(length),
        OFFERED_ROUNDS,
        OFFERED,
        EXPECTED_SCALE,
        BRANCH,
        **programmatic_launch(slots.device),
        num_warps=NUM_WARPS,
    )
    return ChosenRows(offsets, num_verified, expected)


def learn_values_triton(
    values: DraftValues, num_verified: torch.Tensor, slots: torch.Tensor, new_lens: torch.Tensor
) -> None:
    """See `learn_values`."""
    batch, length = len(slots), values.features.shape[1]
    learn_kernel[(1,)](
        *(values.features, values.features.stride(0), values.of_feature, values.of_slot),
        *(values.num_idle, num_verified, slots, new_lens, None, 0, None, 0, batch),
        length,
        triton.next_power_of_2(batch),
        triton.next_power_of_2(length),
        NUM_FEATURES,
        SLOT_RATE,
        PRIOR_DRAFTS,
        MAX_SLOT_NUMBER,
        **programmatic_launch(slots.device),
        num_warps=NUM_WARPS,
    )


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def probabilities(
    features: tl.tensor,
    stride: tl.tensor,
    of_feature: tl.tensor,
    own: tl.tensor,
    slot: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:
    """Features and probabilities of the drafts."""
    places = features + slot[:, None] * stride + column[None, :]
    feature = tl.load(places, mask=exists, other=0)
    number = tl.load(of_feature + feature, mask=exists, other=0.0) + own[:, None]
    return feature, tl.sigmoid(number)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _best(key: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Which keys are the `number` largest ones, equal ones in order. Negative keys are never."""
    low = number * 0
    high = low + 0x7F000000
    for _ in range(31):  # at least `number` keys are not below `low`, fewer not below `high`
        middle = low + (high - low) // 2
        found = tl.sum(tl.sum((key >= middle).to(tl.int32), 1), 0)
        low = tl.where(found >= number, middle, low)
        high = tl.where(found >= number, high, middle)
    is_above, is_equal = key > low, (key == low).to(tl.int32)
    num_left = number - tl.sum(tl.sum(is_above.to(tl.int32), 1), 0)
    in_row = tl.sum(is_equal, 1)
    before = (tl.cumsum(in_row, 0) - in_row)[:, None] + tl.cumsum(is_equal, 1) - is_equal
    return is_above | ((is_equal > 0) & (before < num_left))


@triton.jit(do_not_specialize=["stride", "batch", "num_more", "depth", "num_budgets"])  # type: ignore[untyped-decorator]  # triton has no types
def choose_kernel(
    features: tl.tensor, stride: tl.tensor, of_feature: tl.tensor, of_slot: tl.tensor,
    num_idle: tl.tensor, budgets: tl.tensor, all_num_drafts: tl.tensor, slots: tl.tensor,
    offsets: tl.tensor, num_verified: tl.tensor, expected: tl.tensor, node_values: tl.tensor,
    levels: tl.tensor, is_chosen: tl.tensor, batch: tl.tensor, num_more: tl.tensor,
    depth: tl.tensor, num_budgets: tl.tensor, length: tl.constexpr, block_b: tl.constexpr,
    block_k: tl.constexpr, OFFERED_ROUNDS: tl.constexpr, OFFERED: tl.constexpr,
    EXPECTED_SCALE: tl.constexpr, BRANCH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The first program chooses, each other one adds up what a budget would bring. node_values
    `[2, B, length]` (the second without OFFERED), levels, is_chosen `[B, length]`: of the nodes of
    trees; None: of chains, levels also where there are no budgets."""
    begin(PDL)
    budget = tl.program_id(0) - 1
    request, column = tl.arange(0, block_b), tl.arange(0, block_k)
    is_own = request < batch
    slot = tl.load(slots + request, mask=is_own, other=0)
    own = tl.load(of_slot + slot, mask=is_own, other=0.0)
    num_drafts = tl.load(all_num_drafts + slot, mask=is_own, other=0).to(tl.int32)
    is_chain = budget < -1
    if budget >= 0:
        depth = tl.load(budgets + 3 * budget).to(tl.int32)
        mean_more = tl.load(budgets + 3 * budget + 1) - 1
        is_chain = tl.load(budgets + 3 * budget + 2) == 1
        num_more = tl.ceil(mean_more * batch.to(tl.float32)).to(tl.int32)
    is_place = is_own[:, None] & (column < length)[None, :]
    places = request[:, None] * length + column[None, :]
    if node_values is None:
        _, chance = probabilities(features, stride, of_feature, own, slot, column, is_place)
        is_due = tl.load(num_idle + slot, mask=is_own, other=0) >= OFFERED_ROUNDS - 1
        is_due &= budget < 0
        chance = tl.where(is_due[:, None] & (column == 0)[None, :], OFFERED, chance)
        value = tl.cumprod(chance, 1)
    else:
        own_values = node_values + tl.where(budget < 0, 0, batch * length)
        value = tl.load(own_values + places, mask=is_place, other=0.0)
    # Places without a draft come last, those that are none do not take part.
    exists = column[None, :] < num_drafts[:, None]
    key = tl.where(exists, value.to(tl.int32, bitcast=True) + 1, 0)
    if levels is None:
        is_open = is_place & (column < depth)[None, :]
    else:
        level = tl.load(levels + places, mask=is_place, other=0)
        is_open = is_place & (tl.where(is_chain, level, level % BRANCH) <= depth)
    chosen = _best(tl.where(is_open, key, -1), num_more)
    if budget < 0:
        count = tl.sum(chosen.to(tl.int32), 1)
        verified = tl.minimum(num_drafts, count).to(tl.int64)
        tl.store(num_verified + request, verified, mask=is_own)
        tl.store(offsets, 0)
        tl.store(offsets + 1 + request, tl.cumsum(count + 1, 0), mask=is_own)
        if is_chosen is not None:
            tl.store(is_chosen + places, chosen.to(tl.int32), mask=is_place)
    else:
        total = tl.sum(tl.where(chosen & exists, value, 0.0), 1) * EXPECTED_SCALE
        targets = expected + request * num_budgets + budget
        tl.store(targets, (total + 0.5).to(tl.int64), mask=is_own)


@triton.jit(do_not_specialize=["stride", "parents_stride", "path", "batch"])  # type: ignore[untyped-decorator]  # triton has no types
def learn_kernel(
    features: tl.tensor, stride: tl.tensor, of_feature: tl.tensor, of_slot: tl.tensor,
    all_num_idle: tl.tensor, all_num_verified: tl.tensor, slots: tl.tensor, new_lens: tl.tensor,
    parents: tl.tensor, parents_stride: tl.tensor, rows: tl.tensor, path: tl.tensor,
    batch: tl.tensor, length: tl.constexpr, block_b: tl.constexpr, block_k: tl.constexpr,
    NUM_FEATURES: tl.constexpr, SLOT_RATE: tl.constexpr, PRIOR_DRAFTS: tl.constexpr,
    MAX_SLOT_NUMBER: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """rows `[B, path]`: of trees, what was accepted; None: chains."""
    begin(PDL)
    request, column = tl.arange(0, block_b), tl.arange(0, block_k)
    is_own = request < batch
    slot = tl.load(slots + request, mask=is_own, other=0)
    own = tl.load(of_slot + slot, mask=is_own, other=0.0)
    num_verified = tl.load(all_num_verified + request, mask=is_own, other=0)
    position = column.to(tl.int64)[None, :]
    is_place = is_own[:, None] & (column < length)[None, :]
    if rows is None:
        num_accepted = tl.load(new_lens + request, mask=is_own, other=1) - 1
        is_seen = (position < num_verified[:, None]) & (position <= num_accepted[:, None])
        is_accepted = position < num_accepted[:, None]
    else:
        node, is_accepted = position + 1, is_place & (position < 0)
        parent = parents + slot[:, None] * parents_stride + node
        parent = tl.load(parent, mask=is_place, other=-1)
        is_seen = is_accepted
        for step in range(path):
            row = tl.load(rows + request * path + step, mask=is_own, other=0)[:, None]
            is_accepted |= node == row
            is_seen |= parent == row
        is_seen &= position < num_verified[:, None]
    is_seen &= is_place
    feature, chance = probabilities(features, stride, of_feature, own, slot, column, is_seen)
    error = tl.where(is_seen, is_accepted.to(tl.float32) - chance, 0.0)
    own += SLOT_RATE * tl.sum(error, 1)
    own = tl.minimum(tl.maximum(own, -MAX_SLOT_NUMBER), MAX_SLOT_NUMBER)
    tl.store(of_slot + slot, own, mask=is_own)
    num_idle = tl.load(all_num_idle + slot, mask=is_own, other=0) + 1
    tl.store(all_num_idle + slot, tl.where(num_verified > 0, 0, num_idle), mask=is_own)
    for index in range(NUM_FEATURES):
        is_this = is_seen & (feature == index)
        number = tl.sum(tl.sum(is_this.to(tl.float32), 1), 0)
        change = tl.sum(tl.sum(tl.where(is_this, error, 0.0), 1), 0) / (number + PRIOR_DRAFTS)
        tl.store(of_feature + index, tl.load(of_feature + index) + change)
