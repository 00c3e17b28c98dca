"""How many rows requests share: what a slot learns from rounds, and what it chooses."""

from typing import Any

import pytest

from tllm_spec.config.adaptive_config import AdaptiveConfig
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.estimates import BudgetEstimate
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

SHAPES = DraftShapes.with_budgets(7, (0, 1, 2, 3, 5, 7))
THREE, FIVE, SEVEN = SHAPES.budgeted_tiers
COMPARED = [1, 2, 3, THREE, 5, FIVE, 7, SEVEN]
BATCH = 64


def row_ms(per_row: float, per_draft: float) -> dict[int, float]:
    """The milliseconds of every tier."""
    shapes = {tier: SHAPES.of(tier) for tier in range(SHAPES.further_tiers.stop)}
    return {n: 6 + per_row * s.rows_each + per_draft * s.depth for n, s in shapes.items()}


def controller(
    per_row: float = 1.5,
    per_draft: float = 0.3,
    seconds: dict[int, dict[int, float]] | None = None,
    sizes: tuple[int, ...] = (16, BATCH),
) -> AdaptiveController:
    seconds = seconds or {size: row_ms(per_row, per_draft) for size in sizes}
    config = AdaptiveConfig.parse({"candidate_steps": [0, 1, 2, 3, 5, 7]}, 7)
    return AdaptiveController.from_config(
        config, graph_batch_sizes=sizes, round_times=MeasuredRoundTimes(seconds), shapes=SHAPES
    )


def test_budgets_are_for_batches_of_more_than_16_requests() -> None:
    assert [SHAPES.name(tier) for tier in SHAPES.budgeted_tiers] == ["3@2.5", "5@3.5", "7@4.5"]
    assert SHAPES.compared_tiers == COMPARED
    own = controller()
    assert own.tiers_at(16) == {0, 1, 2, 3, 5, 7}
    assert own.tiers_at(BATCH) == {0, *COMPARED}


def test_large_batches_have_no_whole_windows_of_many_rows() -> None:
    sizes = (64, 65, 128, 512)
    own = controller(sizes=sizes)
    found = {size: own.tiers_at(size) - set(SHAPES.budgeted_tiers) for size in sizes}
    assert found == {64: {0, 1, 2, 3, 5, 7}, 65: {0, 1, 2, 3, 5}, 128: {0, 1, 2, 3}, 512: {0, 1}}


def observe(own: AdaptiveController, tier: int, *expected: float, rounds: int = 60) -> None:
    """Rounds of that tier. expected: accepted drafts of a request by budget."""
    for _ in range(rounds):
        accepted = [1] * BATCH
        own.observe(
            ObservedRound(BATCH, accepted, tier, expected=[each * BATCH for each in expected])
        )


def test_the_tier_with_the_most_expected_tokens_a_second_is_chosen() -> None:
    own = controller()
    observe(own, SEVEN, 0.6, 0.9, 1.1, 1.3, 1.3, 2.0, 1.4, 2.1)
    assert own.tier_for(BATCH) == FIVE  # 7@4.5 has 0.1 more tokens and takes 2.1 ms more
    observe(own, SEVEN, 0.6, 0.9, 1.1, 1.3, 1.3, 2.0, 1.4, 3.1)
    assert own.tier_for(BATCH) == SEVEN
    observe(own, SEVEN, 0.1, 0.12, 0.13, 0.13, 0.13, 0.13, 0.13, 0.13)
    assert own.tier_for(BATCH) == 0
    observe(own, SEVEN, 0.9, 1.7, 2.5, 1.5, 4.0, 2.5, 5.5, 3.5)
    assert own.tier_for(BATCH) == 7  # all drafts are good: whole windows


def estimate() -> BudgetEstimate:
    return BudgetEstimate(SHAPES, (0, 1, 2, 3, 5, 7), 0.6, 64)


def seen(expected: list[float], **more: Any) -> ObservedRound:
    return ObservedRound(2, [1, 1], expected=expected, **more)


def test_longer_drafts_than_there_were_keep_their_share() -> None:
    own = estimate()
    before = list(own.expected)
    for _ in range(500):
        own.observe(seen([0.8, 1.0, 1.1, 1.2, *[1.2] * 4]), THREE)
    known = [own.expected[tier] for tier in (1, 2, 3, THREE)]
    assert known == pytest.approx([0.4, 0.5, 0.55, 0.6])
    ratio = 0.6 / before[THREE]
    assert own.expected[FIVE] == pytest.approx(before[FIVE] * ratio)


def test_whole_windows_show_what_shorter_ones_would_have_brought() -> None:
    own = estimate()
    before = list(own.expected)
    for _ in range(500):
        own.observe(ObservedRound(2, [0, 3]), 3)
    assert [own.expected[tier] for tier in (1, 2, 3)] == pytest.approx([0.5, 1.0, 1.5])
    assert own.expected[SEVEN] == pytest.approx(before[SEVEN] * 1.5 / before[3])
    assert own.rates == [pytest.approx(0.5)], "what the log's line on a switch names"


def test_a_probe_shows_what_the_longest_drafts_would_bring() -> None:
    own = controller(per_row=0.4)
    observe(own, THREE, 0.02, 0.03, 0.03, 0.03, rounds=40)
    assert own.tier_for(BATCH) == 0
    truth = {
        THREE: [0.7, 0.9, 1.0, 1.3],
        FIVE: [0.7, 0.9, 1.0, 1.3, 1.1, 2.2],
        SEVEN: [0.7, 0.9, 1.0, 1.3, 1.1, 2.2, 1.1, 3.2],
    }
    for _ in range(3000):
        tier = own.tier_for(BATCH)
        own.observe(
            ObservedRound(
                BATCH, [0] * BATCH, tier, expected=[n * BATCH for n in truth.get(tier, [])]
            )
        )
    assert own.tier_for(BATCH) == SEVEN
    assert own.state()["slots"]["17"]["expected"]["7@4.5"] == pytest.approx(3.2, abs=0.1)


def test_probes_that_take_less_time_and_emit_fewer_tokens_are_rare() -> None:
    """Longer windows than the probe's are played: round times as of 32 requests on an H200."""
    ms = {0: 5.4, 1: 5.8, 2: 6.4, 3: 6.9, 5: 8.4, 7: 10.0, THREE: 6.5, FIVE: 7.3, SEVEN: 8.2}
    times = {tier: ms.get(tier, 20.0) for tier in range(SHAPES.further_tiers.stop)}
    own = controller(seconds={16: times, BATCH: times})
    accepted = dict(zip(COMPARED, (0.8, 1.43, 1.97, 1.28, 2.69, 1.9, 3.15, 2.4), strict=True))
    counts = enumerate((13, 11, 5, 9, 6, 4, 3, 13))  # the same for whole windows
    runs = [length for length, number in counts for _ in range(number)]
    chosen = []
    for _ in range(1000):
        tier = own.tier_for(BATCH)
        known = [each for each in accepted if SHAPES.of(each).depth <= SHAPES.of(tier).depth]
        expected = [accepted[each] * BATCH for each in known] if tier > 7 else []
        own.observe(ObservedRound(BATCH, [min(n, tier) for n in runs], tier, expected=expected))
        chosen.append(tier)
    assert set(chosen[200:]) == {5, SEVEN} and chosen[200:].count(SEVEN) < 0.15 * 800


def test_the_best_budget_is_found_within_a_hundred_rounds_of_the_start() -> None:
    """Round times and accepted drafts of a batch of 64 with mixed traffic, as on an H100."""
    accepted = dict(zip(COMPARED, (0.54, 0.98, 1.34, 1.23, 1.99, 1.89, 2.47, 2.35), strict=True))
    ms = {0: 9.0, 1: 9.8, 2: 10.8, 3: 11.8, THREE: 10.9, 5: 14.9, FIVE: 12.4, 7: 17.0, SEVEN: 13.9}
    times = {tier: ms.get(tier, 20.0) for tier in range(SHAPES.further_tiers.stop)}
    own = controller(seconds={16: times, BATCH: times})
    chosen = []
    for _ in range(200):
        tier = own.tier_for(BATCH)
        known = [each for each in accepted if SHAPES.of(each).depth <= SHAPES.of(tier).depth]
        expected = [accepted[each] * BATCH for each in known] if tier > 7 else []
        own.observe(ObservedRound(BATCH, [0] * BATCH, tier, expected=expected))
        chosen.append(tier)
    assert set(chosen[100:]) == {SEVEN}
