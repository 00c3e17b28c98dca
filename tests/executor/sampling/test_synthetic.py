"""Synthetic acceptance: by how much the coins follow the rates, and what is emitted."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness, draft_target, output_of
from tllm_spec.executor.sampling.acceptance_rules import synthetic_acceptance
from tllm_spec.kernels.slots.accept import SlotTables
from tllm_spec.kernels.slots.slot_windows import accept_windows

NUM_ROWS = 20_000
RATES = (0.8, 0.5, 0.5, 0.1, 0.0)
TARGETS, DRAFTS = 100, 200  # tokens at position i are these plus i


def accept(
    rates: tuple[float, ...], num_drafts: torch.Tensor | None, seed: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    """Many rounds of one request: every slot is one of them, and begins at another position."""
    length = len(rates) if num_drafts is not None else 0
    slots = torch.arange(NUM_ROWS)
    targets = (TARGETS + torch.arange(length + 1)).repeat(NUM_ROWS, 1)
    window = torch.zeros((NUM_ROWS, length + 1), dtype=torch.int64)
    window[:, 1:] = DRAFTS + torch.arange(length)
    counts = torch.zeros_like(slots) if num_drafts is None else num_drafts.clone()
    tables = SlotTables(slots.clone(), window, counts, torch.zeros_like(slots))
    synthetic = synthetic_acceptance(rates, torch.full((NUM_ROWS,), seed))
    found = accept_windows.reference(tables, slots, slots - 1, targets, None, synthetic)
    return found.tokens, found.lens


def assert_rate(num_hits: int, num_trials: int, rate: float) -> None:
    """Within three standard deviations of a binomial distribution."""
    assert abs(num_hits - rate * num_trials) <= 3 * (num_trials * rate * (1 - rate)) ** 0.5


@pytest.mark.parametrize("seed", [1, 7, 2**63 - 1])
def test_over_many_rounds_draft_i_is_accepted_as_often_as_rate_i_says(seed: int) -> None:
    _, lens = accept(RATES, torch.full((NUM_ROWS,), 5), seed)
    for index, rate in enumerate(RATES):
        assert_rate(int((lens > index + 1).sum()), NUM_ROWS, rate)


def test_a_round_emits_the_accepted_drafts_and_then_the_targets_token() -> None:
    tokens, lens = accept(RATES, torch.full((NUM_ROWS,), 5))
    assert set(lens.tolist()) == {1, 2, 4, 5}  # equal rates stand or fall together
    for length in (1, 2, 4, 5):
        rows = tokens[lens == length][:, :length]
        run = [*range(DRAFTS, DRAFTS + length - 1), TARGETS + length - 1]
        assert (rows == torch.tensor(run)).all()


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_certain_rates_leave_nothing_to_chance(rate: float) -> None:
    _, lens = accept((rate,) * 3, torch.full((NUM_ROWS,), 3))
    assert (lens == 1 + 3 * rate).all()


def test_no_more_drafts_are_accepted_than_were_proposed() -> None:
    num_drafts = torch.arange(NUM_ROWS) % 4
    tokens, lens = accept((0.9, 0.9, 0.9), num_drafts)
    assert (lens <= num_drafts + 1).all() and (lens[num_drafts == 0] == 1).all()
    assert_rate(int((lens[num_drafts == 2] == 3).sum()), NUM_ROWS // 4, 0.9)
    last = tokens.gather(1, (lens - 1).unsqueeze(1)).squeeze(1)
    assert torch.equal(last, TARGETS + lens - 1)


def test_a_round_without_drafts_emits_the_targets_token() -> None:
    tokens, lens = accept((0.9,), None)
    assert tokens.shape == (NUM_ROWS, 1) and (tokens == TARGETS).all() and (lens == 1).all()


def test_a_seed_gives_the_same_numbers_again_and_another_one_others() -> None:
    num_drafts = torch.full((NUM_ROWS,), 5)
    first, again, other = (accept(RATES, num_drafts, seed)[1] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    # Two independent draws of the numbers 0, 1, 3 and 4 with these rates agree in so many rows.
    assert_rate(int((first == other).sum()), NUM_ROWS, 0.2**2 + 0.3**2 + 0.4**2 + 0.1**2)


@pytest.mark.thinned
@pytest.mark.parametrize("options", [{}, {"draft_target_one_model": True}])
def test_requests_are_accepted_at_the_rates_whatever_the_models_say(
    tiny: Path, tiny_draft: Path, options: dict[str, Any]
) -> None:
    rates = (0.7, 0.4, 0.1)
    speculation = draft_target(tiny_draft, 3, synthetic_acceptance_rates=rates, **options)
    outputs = []
    for _ in range(2):
        harness = Harness(tiny, **speculation)
        requests = [
            harness.submit([i, 5], 150, temperature=t, seed=i)
            for i, t in enumerate((None, 0.8) * 4)
        ]
        harness.run()
        outputs.append(list(map(output_of, requests)))
    assert outputs[0] == outputs[1] and all(len(output) == 150 for output in outputs[0])
    stats = [request.counters.stats() for request in requests]
    drafted, accepted = (
        [sum(counts) for counts in zip(*(getattr(each, name) for each in stats), strict=True)]
        for name in ("per_position_drafted", "per_position_accepted")
    )
    for index, rate in enumerate(rates):
        # The last run of a request may be cut off by max_tokens.
        assert_rate(accepted[index], drafted[index], rate)
