"""Which drafts of a batch a round verifies, where they share a number of rows: those that are
likeliest to be accepted. A draft's value is the probability that it and all before it are accepted.

That probability is predicted from what the drafter said about the draft (its feature) and from what
was accepted in its slot: a logistic regression with a number for each feature and one for each
slot, learned as rounds are verified. On CUDA two Triton kernels of one program each, which add in
a fixed order, so that all ranks choose alike; elsewhere the plain-torch reference."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel

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


@dataclass(frozen=True)
class DraftValues:
    """`features` `[S, K]` int32: of the drafts in each slot. `of_feature` `[NUM_FEATURES]` and
    `of_slot` `[S]` float32: log odds, which are added. `num_idle` `[S]` int32: rounds since a draft
    of the slot was verified."""

    features: torch.Tensor
    of_feature: torch.Tensor
    of_slot: torch.Tensor
    num_idle: torch.Tensor

    @classmethod
    def of_slots(cls, num_slots: int, max_draft_len: int, device: torch.device) -> "DraftValues":
        """Before anything was verified: a drafter's probabilities are believed."""
        middles = (torch.arange(NUM_PROBABILITIES, device=device) + 0.5) / NUM_PROBABILITIES
        others = torch.full((NUM_POSITIONS,), PRIOR_LOGIT, device=device)
        positions = torch.arange(max_draft_len, dtype=torch.int32, device=device)
        positions = NUM_PROBABILITIES + positions.clamp_max(NUM_POSITIONS - 1)
        return cls(
            positions.repeat(num_slots, 1),
            torch.cat((middles.logit(), others)),
            torch.zeros(num_slots, device=device),
            torch.zeros(num_slots, dtype=torch.int32, device=device),
        )


def features_of(probs: torch.Tensor) -> torch.Tensor:
    """The features of drafts that the drafter gives these probabilities, int32. NaN counts as 0."""
    steps = (probs.nan_to_num(0.0) * NUM_PROBABILITIES).to(torch.int32)
    return steps.clamp(0, NUM_PROBABILITIES - 1)


@with_kernel("choose_rows_triton.choose_rows_triton", argument=1)
def choose_rows(
    values: DraftValues, num_drafts: torch.Tensor, slots: torch.Tensor, window: int, num_rows: int
) -> torch.Tensor:
    """Gives `num_rows` rows, B to B * window of them, to the windows of slots `[B]`: one to each,
    the others to the drafts of the highest values, equal ones in order. num_drafts `[S]` int64: the
    slots' drafts, which become those that have a row.

    Returns the offsets of the windows' rows, `[B + 1]` int32. Rows that are left when all drafts
    have one go to padding."""
    length = window - 1
    own = num_drafts.index_select(0, slots).clamp_max(length)
    chances = _probabilities(values, slots, length)
    chances[:, 0].masked_fill_(
        values.num_idle.index_select(0, slots) >= OFFERED_ROUNDS - 1, OFFERED
    )
    exists = torch.arange(length, device=slots.device) < own.unsqueeze(1)
    ranked = torch.where(exists, chances.cumprod(1), -1.0).flatten()
    order = ranked.sort(descending=True, stable=True).indices[: num_rows - len(slots)]
    chosen = torch.zeros_like(ranked, dtype=torch.int32)
    chosen.index_fill_(0, order, 1)
    counts = chosen.view(-1, length).sum(1)
    num_drafts[slots] = torch.minimum(own, counts)
    ends = (counts + 1).cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


@with_kernel("choose_rows_triton.learn_values_triton", argument=1)
def learn_values(
    values: DraftValues, num_verified: torch.Tensor, slots: torch.Tensor, new_lens: torch.Tensor
) -> None:
    """A round of slots `[B]` has verified num_verified `[B]` int64 drafts and emitted new_lens
    `[B]` int64 tokens, one more than were accepted."""
    length = values.features.shape[1]
    positions = torch.arange(length, device=slots.device)
    num_accepted = (new_lens - 1).unsqueeze(1)
    # The first rejected draft is the last one that says anything.
    is_seen = (positions < num_verified.unsqueeze(1)) & (positions <= num_accepted)
    is_accepted = (positions < num_accepted).to(torch.float32)
    errors = is_accepted - _probabilities(values, slots, length)
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


def _probabilities(values: DraftValues, slots: torch.Tensor, length: int) -> torch.Tensor:
    """That each draft is accepted if those before it are, `[B, length]`."""
    features = values.features.index_select(0, slots)[:, :length]
    numbers = values.of_feature[features.to(torch.int64)]
    return (numbers + values.of_slot.index_select(0, slots).unsqueeze(1)).sigmoid()
