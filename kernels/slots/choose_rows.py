"""Which drafts of a batch a round verifies, where they share a number of rows: those that are
likeliest to be accepted. A draft's value is the probability that it and all before it are accepted.

That probability is predicted from what the drafter said about the draft (its feature) and from what
was accepted in its slot: a logistic regression with a number for each feature and one for each
slot, learned as rounds are verified. On CUDA two Triton kernels of one program each, which add in
a fixed order, so that all ranks choose alike; elsewhere the plain-torch reference."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

NUM_PROBABILITIES = 16  # features of drafts whose drafter gives probabilities, in equal steps
NUM_POSITIONS = 16  # features of other drafts: their position
NUM_FEATURES = NUM_PROBABILITIES + NUM_POSITIONS
OFFERED_ROUNDS = 32  # a slot without verified drafts has one in so many rounds
# Of the error of a prediction, what is added to the slot's number; and the drafts that the numbers
# of features count for before anything was verified.
SLOT_RATE, PRIOR_DRAFTS = 0.2, 16.0
MAX_SLOT_NUMBER = 6.0
OFFERED = 2.0  # the value of a draft that is verified whatever is predicted
PRIOR_LOGIT = 0.5  # of drafts without a probability
EXPECTED_SCALE = 4096


@dataclass(frozen=True)
class DraftValues:
    """`features` `[S, K]` int32: of the drafts in each slot. `of_feature` `[NUM_FEATURES]` and
    `of_slot` `[S]` float32: log odds, which are added. `num_idle` `[S]` int32: rounds since a draft
    of the slot was verified. `budgets` `[C, 2]` float32: of what else a round could verify, the
    draft length and the rows of a request on average."""

    features: torch.Tensor
    of_feature: torch.Tensor
    of_slot: torch.Tensor
    num_idle: torch.Tensor
    budgets: torch.Tensor

    @classmethod
    def of_slots(
        cls,
        num_slots: int,
        num_drafts: int,
        device: torch.device,
        budgets: Sequence[tuple[int, float]] = (),
    ) -> "DraftValues":
        """The values before anything was verified: half of a drafter's log odds, since drafts that
        it thinks unlikely are hardly ever verified, and would keep too low a value. num_drafts:
        K."""
        middles = (torch.arange(NUM_PROBABILITIES, device=device) + 0.5) / NUM_PROBABILITIES
        others = torch.full((NUM_POSITIONS,), PRIOR_LOGIT, device=device)
        positions = torch.arange(num_drafts, dtype=torch.int32, device=device)
        return cls(
            (NUM_PROBABILITIES + positions.clamp_max(NUM_POSITIONS - 1)).repeat(num_slots, 1),
            torch.cat((middles.logit() / 2, others)),
            torch.zeros(num_slots, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
            torch.tensor(budgets, dtype=torch.float32, device=device).view(-1, 2),
        )


@dataclass(frozen=True)
class ChosenRows:
    """`offsets` `[B + 1]` int32: of the windows' rows. `num_verified` `[B]` int64: drafts that have
    a row. `expected` `[B, C]` int64: of the slots' drafts, how many would be accepted on average
    under each of the budgets, times EXPECTED_SCALE."""

    offsets: torch.Tensor
    num_verified: torch.Tensor
    expected: torch.Tensor


def features_of(probs: torch.Tensor) -> torch.Tensor:
    """The features of drafts that the drafter gives these probabilities, int32. NaN counts as 0."""
    steps = (probs.nan_to_num(0.0) * NUM_PROBABILITIES).to(torch.int32)
    return steps.clamp(0, NUM_PROBABILITIES - 1)


@with_kernel("choose_rows_triton", argument=1)
def choose_rows(
    values: DraftValues, num_drafts: torch.Tensor, slots: torch.Tensor, window: int, num_rows: int
) -> ChosenRows:
    """Gives `num_rows` rows, B to B * window of them, to the windows of slots `[B]`: one to each,
    the others to the drafts of the highest values, equal ones in order. num_drafts `[S]` int64: the
    slots' drafts. Rows that are left when all drafts have one go to padding."""
    length, own = window - 1, num_drafts.index_select(0, slots)
    chances = _probabilities(values, slots)
    worth = chances.cumprod(1)
    expected = _expected_drafts(values, worth, own)
    worth = _offered(values, slots, chances).cumprod(1)
    chosen = _best_drafts(worth, own, length, num_rows - len(slots), pads=True)
    counts = chosen.sum(1)
    ends = torch.nn.functional.pad((counts + 1).cumsum(0), (1, 0))
    return ChosenRows(ends.to(torch.int32), torch.minimum(own, counts), expected)


def _expected_drafts(
    values: DraftValues, worth: torch.Tensor, num_drafts: torch.Tensor
) -> torch.Tensor:
    """`ChosenRows.expected`. worth `[B, K]`: the drafts' values."""
    sums = [worth.new_zeros((0, len(worth)))]
    for length, mean_rows in values.budgets.tolist():
        number = ceil(len(worth) * (mean_rows - 1))
        chosen = _best_drafts(worth, num_drafts, int(length), number)
        sums.append((worth[:, : int(length)] * chosen).sum(1, keepdim=True).T)
    return (torch.cat(sums).T * EXPECTED_SCALE).round().to(torch.int64)


def _best_drafts(
    worth: torch.Tensor, num_drafts: torch.Tensor, length: int, number: int, *, pads: bool = False
) -> torch.Tensor:
    """Which of the first `length` drafts of each request are the `number` of the highest values
    `worth` `[B, K]`, as `[B, length]` bool. pads: others follow, where there are fewer drafts."""
    length = min(length, worth.shape[1])
    exists = torch.arange(length, device=worth.device) < num_drafts.unsqueeze(1)
    ranked = torch.where(exists, worth[:, :length], -1.0).flatten()
    order = ranked.sort(descending=True, stable=True).indices[: max(number, 0)]
    chosen = torch.zeros_like(ranked, dtype=torch.bool).index_fill_(0, order, True).view(-1, length)
    return chosen if pads else chosen & exists


@with_kernel("learn_values_triton", argument=1)
def learn_values(
    values: DraftValues, num_verified: torch.Tensor, slots: torch.Tensor, new_lens: torch.Tensor
) -> None:
    """A round of slots `[B]` has verified num_verified `[B]` int64 drafts and emitted new_lens
    `[B]` int64 tokens, one more than were accepted."""
    positions = torch.arange(values.features.shape[1], device=slots.device)
    num_accepted = (new_lens - 1).unsqueeze(1)
    # The first rejected draft is the last one that says anything.
    is_seen = (positions < num_verified.unsqueeze(1)) & (positions <= num_accepted)
    errors = (positions < num_accepted).to(torch.float32) - _probabilities(values, slots)
    errors = errors.masked_fill(~is_seen, 0.0)
    features = values.features.index_select(0, slots)
    of_each = torch.arange(NUM_FEATURES, device=slots.device)[:, None] == features.flatten()
    seen = (of_each & is_seen.flatten()).sum(1)
    change = (of_each * errors.flatten()).sum(1) / (seen + PRIOR_DRAFTS)
    of_slot = values.of_slot.index_select(0, slots) + SLOT_RATE * errors.sum(1)
    values.of_slot[slots] = of_slot.clamp(-MAX_SLOT_NUMBER, MAX_SLOT_NUMBER)
    values.of_feature.add_(change)
    num_idle = values.num_idle.index_select(0, slots) + 1
    values.num_idle[slots] = num_idle.masked_fill(num_verified > 0, 0)


def _offered(values: DraftValues, slots: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    """Probabilities `chances` `[B, K]` of the drafts of slots `[B]`, but OFFERED for the first one
    of a slot that must have a row."""
    is_due = values.num_idle.index_select(0, slots) >= OFFERED_ROUNDS - 1
    is_due = torch.nn.functional.pad(is_due.unsqueeze(1), (0, chances.shape[1] - 1))
    return chances.masked_fill(is_due, OFFERED)


def _probabilities(values: DraftValues, slots: torch.Tensor) -> torch.Tensor:
    """The probability that each draft is accepted if those before it are, `[B, K]`."""
    features = values.features.index_select(0, slots)
    numbers = values.of_feature[features.to(torch.int64)]
    return (numbers + values.of_slot.index_select(0, slots).unsqueeze(1)).sigmoid()


# The program holds B * K values, some thousands at most. It finds the lowest value that still has
# a row by halving the interval of all float32 numbers, whose bits ascend as they do.


NUM_WARPS = 8


def choose_rows_triton(
    values: DraftValues, num_drafts: torch.Tensor, slots: torch.Tensor, window: int, num_rows: int
) -> ChosenRows:
    """See `choose_rows`."""
    batch, length, num_budgets = len(slots), values.features.shape[1], len(values.budgets)
    offsets = torch.empty(batch + 1, dtype=torch.int32, device=slots.device)
    num_verified = torch.empty_like(slots)
    expected = slots.new_empty((batch, num_budgets))
    _choose[(1 + num_budgets,)](
        *(values.features, values.features.stride(0), values.of_feature, values.of_slot),
        *(values.num_idle, values.budgets, num_drafts, slots, offsets, num_verified, expected),
        *(batch, num_rows - batch, window - 1, num_budgets),
        length,
        triton.next_power_of_2(batch),
        triton.next_power_of_2(length),
        OFFERED_ROUNDS,
        OFFERED,
        EXPECTED_SCALE,
        **programmatic_launch(slots.device, NUM_WARPS),
    )
    return ChosenRows(offsets, num_verified, expected)


def learn_values_triton(
    values: DraftValues, num_verified: torch.Tensor, slots: torch.Tensor, new_lens: torch.Tensor
) -> None:
    """See `learn_values`."""
    batch, length = len(slots), values.features.shape[1]
    _learn[(1,)](
        *(values.features, values.features.stride(0), values.of_feature, values.of_slot),
        *(values.num_idle, num_verified, slots, new_lens, batch),
        length,
        triton.next_power_of_2(batch),
        triton.next_power_of_2(length),
        NUM_FEATURES,
        SLOT_RATE,
        PRIOR_DRAFTS,
        MAX_SLOT_NUMBER,
        **programmatic_launch(slots.device, NUM_WARPS),
    )


@triton.jit
def _block_probabilities(
    features: tl.tensor, stride: tl.tensor, of_feature: tl.tensor, own: tl.tensor, slot: tl.tensor,
    column: tl.tensor, exists: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Features and probabilities of the drafts."""
    places = features + slot[:, None] * stride + column[None, :]
    feature = tl.load(places, mask=exists, other=0)
    number = tl.load(of_feature + feature, mask=exists, other=0.0) + own[:, None]
    return feature, tl.sigmoid(number)


@triton.jit
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


@triton.jit(do_not_specialize=["stride", "batch", "num_more", "depth", "num_budgets"])
def _choose(
    features: tl.tensor, stride: tl.tensor, of_feature: tl.tensor, of_slot: tl.tensor,
    num_idle: tl.tensor, budgets: tl.tensor, all_num_drafts: tl.tensor, slots: tl.tensor,
    offsets: tl.tensor, num_verified: tl.tensor, expected: tl.tensor, batch: tl.tensor,
    num_more: tl.tensor, depth: tl.tensor, num_budgets: tl.tensor, length: tl.constexpr,
    block_b: tl.constexpr, block_k: tl.constexpr, OFFERED_ROUNDS: tl.constexpr,
    OFFERED: tl.constexpr, EXPECTED_SCALE: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """The first program chooses, each other one adds up what a budget would bring. depth: drafts of
    a request that may have a row."""
    begin(PDL)
    budget = tl.program_id(0) - 1
    request, column = tl.arange(0, block_b), tl.arange(0, block_k)
    is_own = request < batch
    slot = tl.load(slots + request, mask=is_own, other=0)
    own = tl.load(of_slot + slot, mask=is_own, other=0.0)
    num_drafts = tl.load(all_num_drafts + slot, mask=is_own, other=0).to(tl.int32)
    if budget >= 0:
        depth = tl.load(budgets + 2 * budget).to(tl.int32)
        mean_more = tl.load(budgets + 2 * budget + 1) - 1
        num_more = tl.ceil(mean_more * batch.to(tl.float32)).to(tl.int32)
    is_place = is_own[:, None] & (column < length)[None, :]
    _, chance = _block_probabilities(features, stride, of_feature, own, slot, column, is_place)
    is_due = tl.load(num_idle + slot, mask=is_own, other=0) >= OFFERED_ROUNDS - 1
    is_due &= budget < 0
    chance = tl.where(is_due[:, None] & (column == 0)[None, :], OFFERED, chance)
    value = tl.cumprod(chance, 1)
    # Places without a draft come last, those that are none do not take part.
    exists = column[None, :] < num_drafts[:, None]
    key = tl.where(exists, value.to(tl.int32, bitcast=True) + 1, 0)
    is_open = is_place & (column < depth)[None, :]
    chosen = _best(tl.where(is_open, key, -1), num_more)
    if budget < 0:
        count = tl.sum(chosen.to(tl.int32), 1)
        verified = tl.minimum(num_drafts, count).to(tl.int64)
        tl.store(num_verified + request, verified, mask=is_own)
        tl.store(offsets, 0)
        tl.store(offsets + 1 + request, tl.cumsum(count + 1, 0), mask=is_own)
    else:
        total = tl.sum(tl.where(chosen & exists, value, 0.0), 1) * EXPECTED_SCALE
        targets = expected + request * num_budgets + budget
        tl.store(targets, (total + 0.5).to(tl.int64), mask=is_own)


@triton.jit(do_not_specialize=["stride", "batch"])
def _learn(
    features: tl.tensor, stride: tl.tensor, of_feature: tl.tensor, of_slot: tl.tensor,
    all_num_idle: tl.tensor, all_num_verified: tl.tensor, slots: tl.tensor, new_lens: tl.tensor,
    batch: tl.tensor, length: tl.constexpr, block_b: tl.constexpr, block_k: tl.constexpr,
    NUM_FEATURES: tl.constexpr, SLOT_RATE: tl.constexpr, PRIOR_DRAFTS: tl.constexpr,
    MAX_SLOT_NUMBER: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, column = tl.arange(0, block_b), tl.arange(0, block_k)
    is_own = request < batch
    slot = tl.load(slots + request, mask=is_own, other=0)
    own = tl.load(of_slot + slot, mask=is_own, other=0.0)
    num_verified = tl.load(all_num_verified + request, mask=is_own, other=0)
    position = column.to(tl.int64)[None, :]
    is_place = is_own[:, None] & (column < length)[None, :]
    num_accepted = tl.load(new_lens + request, mask=is_own, other=1) - 1
    is_seen = (position < num_verified[:, None]) & (position <= num_accepted[:, None])
    is_accepted = position < num_accepted[:, None]
    is_seen &= is_place
    feature, chance = _block_probabilities(features, stride, of_feature, own, slot, column, is_seen)
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
