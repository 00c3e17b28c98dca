"""Which drafts of a batch have a row, what is learned from a round, and the kernels against their
references."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.slots.choose_rows import (
    EXPECTED_SCALE,
    NUM_PROBABILITIES,
    OFFERED_ROUNDS,
    DraftValues,
    choose_rows,
    features_of,
    learn_values,
)

NUM_SLOTS, LENGTH = 9, 5
BUDGETS = ((1, 1.5), (1, 2.0), (4, 2.5), (5, 6.0))


def values_with(probs: torch.Tensor) -> DraftValues:
    device = torch.device("cpu")
    values = DraftValues.of_slots(len(probs), probs.shape[1], device, BUDGETS)
    values.features.copy_(features_of(probs))
    values.of_feature[:NUM_PROBABILITIES] *= 2  # believed wholly
    return values


def random_values(seed: int) -> tuple[DraftValues, torch.Tensor]:
    """With the slots' numbers of drafts."""
    generator = torch.Generator().manual_seed(seed)
    values = values_with(torch.rand(NUM_SLOTS, LENGTH, generator=generator))
    values.of_slot.copy_(torch.randn(NUM_SLOTS, generator=generator))
    values.num_idle.copy_(torch.randint(0, 40, (NUM_SLOTS,), generator=generator))
    return values, torch.randint(0, LENGTH + 1, (NUM_SLOTS,), generator=generator)


def moved(values: DraftValues, device: str) -> DraftValues:
    return DraftValues(*(each.clone().to(device) for each in vars(values).values()))


def counts(values: DraftValues, num_drafts: list[int], num_rows: int) -> list[int]:
    slots = torch.arange(len(num_drafts))
    drafts = torch.tensor(num_drafts)
    window = values.features.shape[1] + 1
    chosen = choose_rows(values, drafts, slots, window, num_rows)
    found: list[int] = chosen.offsets.diff().tolist()
    verified = [min(n, c - 1) for n, c in zip(num_drafts, found, strict=True)]
    assert chosen.num_verified.tolist() == verified
    return found


def test_the_likeliest_drafts_have_the_rows() -> None:
    values = values_with(torch.tensor([[0.9, 0.9, 0.9], [0.2, 0.9, 0.9], [0.6, 0.6, 0.1]]))
    assert counts(values, [3, 3, 3], 3) == [1, 1, 1]
    assert counts(values, [3, 3, 3], 5) == [3, 1, 1]
    assert counts(values, [3, 3, 3], 8) == [4, 1, 3]
    assert counts(values, [1, 0, 3], 5) == [2, 1, 2]


def test_what_other_budgets_would_bring_is_expected() -> None:
    values = values_with(torch.tensor([[0.9, 0.9], [0.2, 0.9]]))
    first, second = (torch.tensor([0.90625, 0.21875])).tolist()  # the middles of their steps
    chosen = choose_rows(values, torch.tensor([2, 1]), torch.arange(2), 3, 3)
    of_budgets = [[first], [first, second], [first, first**2, second]]
    found = (chosen.expected.sum(0) / EXPECTED_SCALE).tolist()
    assert found == pytest.approx([*map(sum, of_budgets), sum(of_budgets[-1])], abs=1e-3)


def test_padding_has_the_rows_that_no_draft_needs() -> None:
    values = values_with(torch.full((3, 3), 0.5))
    assert counts(values, [0, 1, 0], 4) == [1, 2, 1]
    assert counts(values, [0, 1, 0], 6) == [3, 2, 1]


def test_a_slot_without_verified_drafts_has_one_now_and_then() -> None:
    values = values_with(torch.tensor([[0.9, 0.9], [0.1, 0.1]]))
    values.of_slot[1], slots = -5.0, torch.arange(2)
    for turn in range(2 * OFFERED_ROUNDS):
        found = counts(values, [2, 2], 4)
        is_due = turn % OFFERED_ROUNDS == OFFERED_ROUNDS - 1
        assert found == ([2, 2] if is_due else [3, 1])
        learn_values(values, torch.tensor(found) - 1, slots, torch.tensor([3, 1]))


def test_what_was_accepted_moves_the_slot_and_the_feature() -> None:
    values = values_with(torch.full((2, 3), 0.5))
    before = values.of_feature.clone()
    num_verified, slots = torch.tensor([3, 3]), torch.arange(2)
    for _ in range(50):
        learn_values(values, num_verified, slots, torch.tensor([4, 1]))
    assert values.of_slot[0] > 2 and values.of_slot[1] < -2
    assert counts(values, [3, 3], 5) == [4, 1]
    learn_values(values, num_verified, slots, torch.tensor([4, 4]))
    assert (values.of_feature != before).nonzero().flatten().tolist() == [8]


@on_each_kernel_device
@pytest.mark.parametrize("window", [2, 4, LENGTH + 1])
def test_the_kernel_chooses_like_the_reference(device: str, window: int) -> None:
    for seed, share in enumerate((0.0, 0.3, 0.6, 1.0)):
        values, num_drafts = random_values(seed)
        slots = torch.tensor([3, 0, 8, 5, 8, 7])
        num_rows = len(slots) + round(share * len(slots) * (window - 1))
        there, own = moved(values, device), num_drafts.to(device)
        expected = choose_rows.reference(values, num_drafts, slots, window, num_rows)
        found = choose_rows(there, own, slots.to(device), window, num_rows)
        assert found.offsets.tolist() == expected.offsets.tolist()
        assert found.offsets[-1] == num_rows
        assert found.num_verified.tolist() == expected.num_verified.tolist()
        assert (found.expected.cpu() - expected.expected).abs().max() <= 1
        assert expected.expected.sum(0).diff()[:2].min() > 0


@on_each_kernel_device
def test_the_kernel_learns_like_the_reference(device: str) -> None:
    values, num_drafts = random_values(7)
    there, slots = moved(values, device), torch.tensor([3, 0, 8, 5, 7])
    generator = torch.Generator().manual_seed(3)
    for _ in range(5):
        num_verified = num_drafts[slots]
        new_lens = 1 + (torch.rand(len(slots), generator=generator) * (num_verified + 1)).long()
        learn_values.reference(values, num_verified, slots, new_lens)
        learn_values(there, *(each.to(device) for each in (num_verified, slots, new_lens)))
    for name, expected in vars(values).items():
        torch.testing.assert_close(getattr(there, name).cpu(), expected, msg=name)
