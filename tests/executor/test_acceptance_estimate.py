"""Acceptance by position: what a round shows, what is inferred, how estimates age."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.executor.harness import Harness, output_of
from tests.executor.played_rounds import LADDER, LinearTimes
from tests.executor.simulated_rounds import (
    GRAPH_BATCH_SIZES,
    MAX_STEPS,
    TIMES,
    TRUE_TIMES,
    Simulator,
    static_rates,
)
from tests.lossless.engines import tiny_engine
from tllm_spec.config.adaptive_config import AdaptiveConfig
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.speculative.draft_length import estimates as acceptance_estimate
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.estimates import AcceptanceEstimate, BudgetEstimate
from tllm_spec.executor.speculative.draft_length.round_times import (
    ASSUMED_TIMES,
    CorrectedRoundTimes,
    MeasuredRoundTimes,
)


def estimate_of(num_positions: int, prior: float = 0.6) -> AcceptanceEstimate:
    return AcceptanceEstimate((0, num_positions), prior, window=256.0)


def test_before_anything_is_seen_every_position_has_the_prior() -> None:
    estimate = estimate_of(3, prior=0.5)
    assert estimate.rates == [0.5] * 3
    assert estimate.expected == [0, 0.5, 0.75, 0.875]


def test_a_round_shows_one_position_more_than_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_estimate, "PRIOR_TRIALS", 1e-9)
    monkeypatch.setattr(acceptance_estimate, "SHARED_TRIALS", 1e-9)
    estimate = estimate_of(3)
    estimate.observe_lengths(4, [0, 1, 1, 3], 3)
    assert estimate.rates == pytest.approx([3 / 4, 1 / 3, 0.999], abs=1e-3)
    assert estimate.expected == pytest.approx([0, 0.75, 1.0, 1.25], abs=2e-3)


def test_windows_longer_than_255_drafts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_estimate, "SHARED_TRIALS", 1e-9)
    estimate = estimate_of(300)
    estimate.observe_lengths(2, [280, 300], 300)
    assert estimate.rates[279:282] == pytest.approx([0.999, 1 / 2, 0.999], abs=1e-3)


def test_drafts_of_a_longer_round_than_the_ladder_count_as_far_as_it_goes() -> None:
    estimate = estimate_of(2)
    for _ in range(300):
        estimate.observe_lengths(1, [4], 4)
    assert min(estimate.rates) > 0.95


def test_positions_without_evidence_follow_the_others() -> None:
    estimate = estimate_of(3)
    for _ in range(500):
        estimate.observe_lengths(1, [1], 1)
    assert estimate.rates[2] > 0.95
    for _ in range(1000):
        estimate.observe_lengths(1, [0], 1)
    assert estimate.rates[2] < 0.1


def test_positions_without_evidence_follow_the_others_within_a_few_rounds() -> None:
    estimate = estimate_of(3)
    for _ in range(4):
        estimate.observe_lengths(8, [1] * 8, 1)
    assert min(estimate.rates) > 0.9


def test_the_prior_follows_what_was_seen_and_outlives_it() -> None:
    """After thousands of idle rounds a position that was never reached still expects little."""
    estimate = estimate_of(2)
    for _ in range(500):
        estimate.observe_lengths(1, [0], 1)
    for _ in range(5000):
        estimate.observe_lengths(1, [], 0)
    estimate.observe_lengths(1, [0], 1)
    assert estimate.rates[1] < 0.1


def test_positions_beyond_the_present_length_keep_a_quarter_of_the_window() -> None:
    """An accepted draft there then moves the estimate less than after plain decoding."""

    def moved_by_one_acceptance(idle_steps: int) -> float:
        estimate = estimate_of(2)
        for _ in range(500):
            estimate.observe_lengths(1, [1], 2)  # the second draft is always wrong
        for _ in range(5000):
            estimate.observe_lengths(1, [1] if idle_steps else [], idle_steps)
        before = estimate.rates[1]
        estimate.observe_lengths(1, [2], 2)
        return estimate.rates[1] - before

    assert 0 < moved_by_one_acceptance(1) < moved_by_one_acceptance(0) / 3


def test_a_position_that_was_seen_keeps_its_own_rate() -> None:
    estimate = estimate_of(2)
    for _ in range(500):
        estimate.observe_lengths(1, [1], 2)  # the second draft is always wrong
    assert estimate.rates[0] > 0.9 and estimate.rates[1] < 0.1


def test_rounds_without_drafts_keep_an_estimate_and_make_it_easy_to_change() -> None:
    def rate_after_one_acceptance(idle_rounds: int) -> tuple[float, float]:
        estimate = estimate_of(1)
        for _ in range(500):
            estimate.observe_lengths(1, [0], 1)
        for _ in range(idle_rounds):
            estimate.observe_lengths(1, [], 0)
        before = estimate.rates[0]
        estimate.observe_lengths(1, [1], 1)
        return before, estimate.rates[0] - before

    (recent, small), (old, large) = rate_after_one_acceptance(0), rate_after_one_acceptance(2000)
    assert old == pytest.approx(recent, abs=0.02) and large > 3 * small


def test_a_round_without_drafts_ages_an_estimate_as_eight_requests_do() -> None:
    def rate_after_idle_rounds_of(num_requests: int) -> float:
        estimate = estimate_of(1)
        for _ in range(500):
            estimate.observe_lengths(1, [0], 1)
        for _ in range(30):
            estimate.observe_lengths(num_requests, [], 0)
        estimate.observe_lengths(1, [1], 1)
        return estimate.rates[0]

    one, eight, many = map(rate_after_idle_rounds_of, (1, 8, 32))
    assert one == eight < many


def test_an_estimate_never_becomes_certain() -> None:
    for accepted, bound in ((0, acceptance_estimate.MIN_RATE), (1, acceptance_estimate.MAX_RATE)):
        estimate = estimate_of(1)
        for _ in range(20_000):
            estimate.observe_lengths(1, [accepted], 1)
        assert 0.001 <= estimate.rates[0] <= 0.999
        assert estimate.rates[0] == pytest.approx(bound, abs=2e-3)


def test_more_requests_fill_the_memory_in_fewer_rounds() -> None:
    def rate(batch_size: int, rounds: int) -> float:
        estimate = estimate_of(1)
        for _ in range(2000):
            estimate.observe_lengths(batch_size, [1] * batch_size, 1)
        for _ in range(rounds):
            estimate.observe_lengths(batch_size, [0] * batch_size, 1)
        return estimate.rates[0]

    assert rate(32, 8) < 0.5 < rate(1, 8)


# Round times: between measured ones, and corrected by what the present contexts add.


def corrected(*, has_contexts: bool = True) -> CorrectedRoundTimes:
    """10, 11, 12 and 13 ms."""
    return CorrectedRoundTimes(LinearTimes(1.0, has_contexts=has_contexts), LADDER)


def test_times_between_measured_ones_lie_on_a_line() -> None:
    times = MeasuredRoundTimes({2: {0: 1.0, 4: 3.0}, 4: {0: 2.0, 4: 8.0}})
    assert times.round_time(2, 2) == 2.0 and times.round_time(3, 0) == 1.5
    assert times.round_time(3, 2) == pytest.approx((2.0 + 5.0) / 2)
    assert times.round_time(1, 0) == 1.0  # before the first
    assert times.round_time(8, 0) == pytest.approx(4.0)  # on the line of the last two


@pytest.mark.parametrize(
    "tree", [[], {}, {"round_ms": {}}, {"round_ms": {"1": {}}}, {"round_ms": {"1": {"0": 0}}}, 3]
)
def test_round_times_that_cannot_be_meant_are_refused(tree: object) -> None:
    with pytest.raises(ValueError):
        MeasuredRoundTimes.from_json(tree)


def test_without_measurements_every_draft_takes_the_same_share() -> None:
    times = ASSUMED_TIMES
    one, two = (times.round_time(1, steps) - times.round_time(1, 0) for steps in (1, 2))
    assert two == pytest.approx(2 * one) and 0 < one < 0.2


def test_longer_contexts_add_the_same_time_to_all_lengths() -> None:
    times = corrected()
    for _ in range(500):
        times.observe(1, 1, 0.016)  # measured: 11 ms
    assert [times.row(1)[steps] for steps in LADDER] == pytest.approx(
        [0.015, 0.016, 0.017, 0.018], rel=0.01
    )
    assert times.row(2)[0] == pytest.approx(0.010)  # another batch size has its own


def test_what_a_length_takes_longer_than_the_one_before_it_is_its_own_error() -> None:
    """Its measurement at start-up was 8% too short, those of the others were right."""
    times = corrected()
    for steps, number in ((0, 60), (3, 30), (0, 30), (3, 5)):
        for _ in range(number):
            times.observe(1, steps, 0.010 if steps == 0 else 0.01404)
    row = times.row(1)
    assert row[3] > 0.0136 and row[0] < 0.0102 and row[1] < 0.0112 and row[2] < 0.0122


def test_shorter_contexts_never_make_a_time_fall_below_half() -> None:
    times = corrected()
    for _ in range(2000):
        times.observe(1, 0, 1e-6)
    assert min(times.row(1).values()) >= 0.005 - 1e-9


@pytest.mark.parametrize("seconds", [1.0, 1e-9])
def test_one_round_that_took_a_second_or_no_time_changes_the_times_little(seconds: float) -> None:
    times = corrected()
    times.observe(1, 0, seconds)
    assert 0.0097 < times.row(1)[0] < 0.0103


def test_times_without_contexts_are_not_corrected() -> None:
    """A slower machine stretches all lengths alike, which decides nothing."""
    times = corrected(has_contexts=False)
    for _ in range(100):
        times.observe(1, 0, 0.030)
    assert times.row(1)[0] == pytest.approx(0.010)


def test_a_length_that_is_not_in_the_ladder_is_ignored() -> None:
    times = corrected()
    times.observe(1, 7, 1.0)
    assert times.row(1)[0] == pytest.approx(0.010)
    assert times.state() == {"1": pytest.approx({"0": 10, "1": 11, "2": 12, "3": 13})}


# How many rows requests share: what a slot learns from rounds, and what it chooses.


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


def chosen_tiers(
    ms: dict[int, float], accepted: tuple[float, ...], runs: list[int], rounds: int
) -> list[int]:
    """What is chosen in each round. ms: by tier. accepted: drafts of a request by COMPARED. runs:
    accepted drafts of each request where whole windows are as long."""
    times = {tier: ms.get(tier, 20.0) for tier in range(SHAPES.further_tiers.stop)}
    own, chosen = controller(seconds={16: times, BATCH: times}), list[int]()
    for _ in range(rounds):
        chosen.append(tier := own.tier_for(BATCH))
        known = zip(COMPARED, accepted, strict=True)
        seen = [n * BATCH for each, n in known if SHAPES.of(each).depth <= SHAPES.of(tier).depth]
        expected = seen if tier > 7 else []
        own.observe(ObservedRound(BATCH, [min(n, tier) for n in runs], tier, expected=expected))
    return chosen


def test_probes_that_take_less_time_and_emit_fewer_tokens_are_rare() -> None:
    """Longer windows than the probe's are played: round times as of 32 requests on an H200."""
    ms = {0: 5.4, 1: 5.8, 2: 6.4, 3: 6.9, 5: 8.4, 7: 10.0, THREE: 6.5, FIVE: 7.3, SEVEN: 8.2}
    counts = enumerate((13, 11, 5, 9, 6, 4, 3, 13))  # the same for whole windows
    runs = [length for length, number in counts for _ in range(number)]
    chosen = chosen_tiers(ms, (0.8, 1.43, 1.97, 1.28, 2.69, 1.9, 3.15, 2.4), runs, 1000)
    assert set(chosen[200:]) == {5, SEVEN} and chosen[200:].count(SEVEN) < 0.15 * 800


def test_the_best_budget_is_found_within_a_hundred_rounds_of_the_start() -> None:
    """Round times and accepted drafts of a batch of 64 with mixed traffic, as on an H100."""
    ms = {0: 9.0, 1: 9.8, 2: 10.8, 3: 11.8, THREE: 10.9, 5: 14.9, FIVE: 12.4, 7: 17.0, SEVEN: 13.9}
    accepted = (0.54, 0.98, 1.34, 1.23, 1.99, 1.89, 2.47, 2.35)
    assert set(chosen_tiers(ms, accepted, [0] * BATCH, 200)[100:]) == {SEVEN}


# Draft lengths that depend on the context: rounds of short and of long texts learn apart.


BATCH_SIZE, SHORT, LONG, BOUND = 64, 500, 20_000, 4096
ACCEPTANCE = {SHORT: 0.8, LONG: 0.05}  # of a head that was trained on short texts
TURN = 0.5  # seconds that texts of one kind run, in which an estimate cannot follow for long


def context_at(now: float) -> int:
    return LONG if int(now / TURN) % 2 else SHORT


def traffic(now: float) -> np.ndarray:
    return np.full(BATCH_SIZE, ACCEPTANCE[context_at(now)])


def context_buckets_controller(*buckets: int, **more: Any) -> AdaptiveController:
    config = {"candidate_steps": list(range(MAX_STEPS + 1)), "context_buckets": buckets, **more}
    return AdaptiveController.from_config(
        config, graph_batch_sizes=GRAPH_BATCH_SIZES, round_times=TIMES
    )


def test_short_and_long_contexts_by_turns_are_served_better_apart() -> None:
    rates = {
        buckets: Simulator(
            context_buckets_controller(*buckets), TRUE_TIMES, 7, context_at=context_at
        )
        .run(traffic, 20.0)
        .rate
        for buckets in ((), (BOUND,))
    }
    best = np.mean([max(static_rates(BATCH_SIZE, each)) for each in ACCEPTANCE.values()])
    assert rates[(BOUND,)] > 1.15 * rates[()], rates
    assert rates[(BOUND,)] > 0.98 * best, (rates, best)


def test_what_is_known_of_a_bucket_comes_from_its_rounds() -> None:
    controls = context_buckets_controller(BOUND)
    Simulator(controls, TRUE_TIMES, 7, context_at=context_at).run(traffic, 10.0)
    state = controls.state()
    slots = state["slots"]
    assert slots["1"]["acceptance"][0] == pytest.approx(ACCEPTANCE[SHORT], abs=0.08)
    assert slots[f"1@{BOUND}"]["acceptance"][0] == pytest.approx(ACCEPTANCE[LONG], abs=0.08)
    lengths = [slots[slot]["steps"][str(BATCH_SIZE)] for slot in ("1", f"1@{BOUND}")]
    assert lengths[0] > lengths[1]
    assert state["round_ms"].keys() == {str(BATCH_SIZE), f"{BATCH_SIZE}@{BOUND}"}
    reasons = [switch["reason"] for switch in state["decisions"]["last"]]
    assert any(reason.startswith(f"contexts of {BOUND} tokens or more; ") for reason in reasons)


@pytest.mark.parametrize("strategy", ["cost_model", "ema"])
def test_without_a_bound_between_them_contexts_change_nothing(strategy: str) -> None:
    outcomes = []
    for buckets, contexts in (((), lambda now: 0), ((), context_at), ((LONG + 1,), context_at)):
        controls = context_buckets_controller(*buckets, strategy=strategy)
        simulator = Simulator(controls, TRUE_TIMES, 7, context_at=contexts)
        outcomes.append((simulator.run(traffic, 5.0), controls.state()["slots"]["1"]))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_contexts_that_waver_around_a_bound_stay_in_their_bucket() -> None:
    controls = context_buckets_controller(BOUND)
    found = []
    for context_len in (BOUND + 50, BOUND - 50, BOUND + 300, BOUND - 300, BOUND // 2, BOUND):
        controls.note_context(context_len)
        found.append(controls.context_len >= BOUND)
    assert found == [True, True, True, True, False, True]


def test_every_bucket_may_choose_the_same_lengths() -> None:
    one, two = context_buckets_controller(), context_buckets_controller(BOUND)
    assert one.tiers_at(8) == two.tiers_at(8)
    assert one.tiers == two.tiers


def test_rounds_are_told_of_with_the_context_that_they_were_chosen_for(
    tiny: Path, drafts: tuple[Path, Path]
) -> None:
    bound = 20
    adaptive = {"candidate_steps": [1, 3], "context_buckets": [bound]}
    harness = Harness(tiny, **tiny_engine("draft_target", drafts, 3, adaptive=adaptive))
    controls, told = harness.parts.controller, list[int]()
    observe = controls.observe

    def listen(observed: ObservedRound) -> bool:
        told.append(observed.context_len)
        return observe(observed)

    controls.observe = listen  # type: ignore[method-assign] # the test listens
    request = harness.submit([1, 2, 3], max_tokens=40)
    harness.run()
    assert len(output_of(request)) == 40
    assert told == sorted(told) and told[0] <= 8 and told[-1] > bound
    assert controls.state()["slots"].keys() == {"1", f"1@{bound}"}
