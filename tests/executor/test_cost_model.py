"""`strategy: cost_model`: what it learns, when it switches, what it probes and at which cost."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from tests.executor.played_rounds import LADDER, LinearTimes, controller, play, settled
from tllm_spec.adaptive_config import CostModelOptions, RoundTimeOptions
from tllm_spec.executor.speculative.draft_length.acceptance_estimate import AcceptanceEstimate
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.draft_len_limits import (
    AcceptanceGate,
    DraftLenLimits,
)
from tllm_spec.executor.speculative.draft_length.round_times import (
    CorrectedRoundTimes,
    MeasuredRoundTimes,
)


@pytest.mark.parametrize(("num_accepted", "expected"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_the_length_settles_on_what_is_accepted(num_accepted: int, expected: int) -> None:
    controls = controller()
    play(controls, 600, num_accepted)
    assert settled(controls) == expected


def test_drafts_that_cost_more_than_they_can_bring_are_not_made() -> None:
    dear = controller(draft_ms=11.0)  # even a sure draft brings 10 ms
    assert set(play(dear, 3000, 3)[100:]) == {0}


def test_a_longer_length_must_beat_the_present_one_by_the_margin() -> None:
    def switches(margin: float) -> int:
        controls = controller(
            draft_ms=5.0,
            switch_margin=margin,
            window_trials=8.0,
            probe_round_share=0.0,
            plain_after_loss=0.0,
        )
        for number in range(400):  # half of the first drafts: one draft brings as much as it costs
            steps = controls.steps_for(1)
            controls.observe(1, [number % 2 if steps else 0], max(steps, 1))
        return int(controls.state()["decisions"]["num_switches"])

    assert switches(0.3) < switches(0.0) / 4


def test_a_window_shows_one_position_more_than_was_accepted() -> None:
    options = CostModelOptions(candidate_steps=LADDER, prior_weight=1e-6, ratio_weight=1e-6)
    estimate = AcceptanceEstimate(3, options)
    estimate.observe(4, [0, 1, 1, 3], 3)
    assert estimate.rates == pytest.approx([3 / 4, 1 / 3, 0.999], abs=1e-3)
    assert estimate.expected_accepted == pytest.approx([0, 0.75, 1.0, 1.25], abs=2e-3)


def test_windows_longer_than_a_byte_counts_are_seen_to_their_end() -> None:
    options = CostModelOptions(candidate_steps=(0, 300), prior_weight=1e-6, ratio_weight=1e-6)
    estimate = AcceptanceEstimate(300, options)
    estimate.observe(2, [280, 300], 300)
    assert estimate.rates[279:282] == pytest.approx([0.999, 1 / 2, 0.999], abs=1e-3)


def test_positions_beyond_the_window_move_with_those_inside_it() -> None:
    estimate = AcceptanceEstimate(3, CostModelOptions(candidate_steps=LADDER))
    for _ in range(500):
        estimate.observe(1, [1], 1)
    assert estimate.rates[2] > 0.95
    for _ in range(1000):
        estimate.observe(1, [0], 1)
    assert estimate.rates[2] < 0.1


def test_a_position_that_is_always_worse_stays_so_when_it_is_no_longer_drafted() -> None:
    estimate = AcceptanceEstimate(2, CostModelOptions(candidate_steps=(0, 2)))
    for _ in range(500):
        estimate.observe(1, [1], 2)  # the second draft is always wrong
    for _ in range(2000):
        estimate.observe(1, [1], 1)
    assert estimate.rates[0] > 0.9 and estimate.rates[1] < 0.25


def test_time_without_drafts_keeps_an_estimate_but_makes_it_easy_to_change() -> None:
    def after_one_acceptance(idle_rounds: int) -> tuple[float, float]:
        estimate = AcceptanceEstimate(1, CostModelOptions(candidate_steps=(0, 1)))
        for _ in range(500):
            estimate.observe(1, [0], 1)
        for _ in range(idle_rounds):
            estimate.observe(1, [], 0)
        kept = estimate.rates[0]
        estimate.observe(1, [1], 1)
        return kept, estimate.rates[0]

    (fresh_kept, fresh), (stale_kept, stale) = after_one_acceptance(0), after_one_acceptance(5000)
    assert stale_kept == fresh_kept < 0.05 and stale > 0.1 > fresh


def test_probes_cost_one_round_in_a_hundred_at_most() -> None:
    asked = play(controller(), 20_000, 0)[1000:]
    assert 0 < sum(steps > 0 for steps in asked) <= 0.011 * len(asked)


def test_probes_are_rarer_where_a_round_of_them_adds_much_time() -> None:
    rounds = 20_000
    cheap, dear = (
        sum(steps > 0 for steps in play(controller(draft_ms=ms), rounds, 0)[1000:])
        for ms in (0.5, 9.0)
    )
    assert 0 < dear < 0.8 * cheap
    assert dear * 9.0 <= 0.006 * rounds * 10  # milliseconds that probes added


def test_after_plain_decoding_good_drafts_are_found_again_by_a_probe() -> None:
    controls = controller()
    play(controls, 2000, 0)
    assert settled(controls) == 0
    play(controls, 1100, 3)
    assert settled(controls) == 3


def rounds_until(
    controls: AdaptiveController, goal: int, num_accepted: int, batch_size: int = 1
) -> int:
    for number in range(5000):
        if controls.steps_for(batch_size) == goal:
            return number
        play(controls, 1, num_accepted, batch_size)
    raise AssertionError("never")


def test_drafting_is_given_up_at_once_where_rounds_without_drafts_are_seen_too() -> None:
    controls = controller(draft_ms=2.5)
    controls.expect_unverified()
    assert rounds_until(controls, 0, 0) < 40
    for _ in range(12):
        controls.learn(1, [3], 3, 1)
    assert controls.steps_for(1) == 3


def test_another_text_is_noticed_long_before_the_memory_of_the_last_one_has_faded() -> None:
    def delay(**keys: float) -> int:
        controls = controller(**keys)
        play(controls, 2000, 3)
        return rounds_until(controls, 1, 0)

    assert delay() < 35
    assert delay(change_excess=1e9) > 2 * delay()


@pytest.mark.parametrize("accepted", [0, 1])
def test_an_estimate_begins_anew_whichever_way_the_text_changes(accepted: int) -> None:
    estimate = AcceptanceEstimate(1, CostModelOptions(candidate_steps=(0, 1)))
    for _ in range(2000):
        estimate.observe(1, [1 - accepted], 1)
    for _ in range(12):
        estimate.observe(1, [accepted], 1)
    assert abs(estimate.rates[0] - accepted) < 0.5


def test_chance_is_not_taken_for_another_text() -> None:
    estimate = AcceptanceEstimate(1, CostModelOptions(candidate_steps=(0, 1), window_trials=1e9))
    chance, weights = Random(1), []
    for _ in range(10_000):
        estimate.observe(1, [chance.random() < 0.5], 1)
        weights.append(estimate._weights[0])
    assert sum(later < before for before, later in pairwise(weights)) <= 5  # it began anew so often


def test_drafting_is_given_up_only_after_it_has_lost_what_the_option_says() -> None:
    """A round with one draft takes 1.25 plain rounds and brings one token: a quarter is lost."""

    def rounds(loss: float, batch_size: int) -> int:
        controls = controller(draft_ms=2.5, plain_after_loss=loss)
        play(controls, 20, 0, batch_size)  # until the estimate knows
        return 20 + rounds_until(controls, 0, 0, batch_size)

    assert rounds(40.0, 1) - rounds(20.0, 1) == pytest.approx(80, abs=2)
    assert rounds(40.0, 8) - rounds(20.0, 8) == pytest.approx(80, abs=2)
    assert rounds(80.0, 32) - rounds(40.0, 32) == pytest.approx(
        40, abs=2
    )  # four times probe_trials


def test_what_drafts_have_won_they_may_lose_again() -> None:
    def rounds(win: float, batch_size: int) -> int:
        controls = controller(draft_ms=2.5, plain_after_loss=10.0, plain_after_win=win)
        play(controls, 200, 1, batch_size)
        return rounds_until(controls, 0, 0, batch_size)

    assert rounds(30.0, 1) - rounds(10.0, 1) == pytest.approx(80, abs=2)
    assert rounds(30.0, 32) - rounds(10.0, 32) == pytest.approx(20, abs=2)


def test_drafts_that_are_never_right_cost_little_from_the_first_round_on() -> None:
    """Nothing was won before, so that five plain rounds are the most that they lose, beside
    probes."""
    for draft_ms in (0.5, 2.0, 8.0):
        lost_ms = sum(draft_ms * steps for steps in play(controller(draft_ms), 1000, 0))
        assert lost_ms <= 50 + 0.01 * 1000 * 10


def test_a_drafter_that_never_drafts_cannot_hold_a_probe_open() -> None:
    controls = controller()
    play(controls, 2000, 0)
    probing = 0
    for _ in range(1200):
        probing += controls.steps_for(1) > 0
        controls.observe(1, [], 0)
    assert 0 < probing <= 3 * 7


def test_drafts_that_are_never_right_leave_an_estimate_that_others_can_change() -> None:
    options = {"candidate_steps": [1, 3], "window_rounds": 1, "window_trials": 1, "ratio_weight": 1}
    controller = AdaptiveController.from_config(options)
    for _ in range(5000):
        controller.observe(64, [0] * 64, controller.steps_for(64))
    for _ in range(200):
        steps = controller.steps_for(64)
        controller.observe(64, [steps] * 64, steps)
    assert controller.steps_for(64) == 3


def test_a_batch_size_that_never_drafts_may_be_told_of_drafts() -> None:
    """A round can shrink behind its draft length, and drafters on the host are watched at every
    batch size."""
    controller = AdaptiveController.from_config(
        {1: {"candidate_steps": [0]}, 4: {"candidate_steps": [1, 3]}}
    )
    assert controller.steps_for(4) > 0
    controller.observe(3, [1, 0, 1], 3, 0.01)
    controller.learn(2, [1], 3, 2)
    assert controller.steps_for(3) == 0


def test_asking_twice_gives_the_same_answer() -> None:
    controls = controller()
    for number in range(1500):
        first = [controls.steps_for(size) for size in (1, 2, 8)]
        assert first == [controls.steps_for(size) for size in (1, 2, 8)]
        controls.observe(1, [number % 3 % (first[0] + 1)], first[0])


def test_a_change_is_reported_once_and_kept_with_its_reason() -> None:
    controls = controller()
    reports = []
    for _ in range(600):
        before = controls.steps_for(1)
        changed = controls.observe(1, [0] if before else [], before)
        assert changed == (controls.steps_for(1) != before)
        reports += [changed]
    assert 0 < sum(reports) <= 3 + 2 * 4  # shorter and shorter, then probes begin and end
    last = controls.state()["decisions"]["last"][-1]
    assert last["new_steps"] == 0 and "acceptance by position" in last["reason"]


def test_requests_that_are_not_drafted_for_lower_what_drafts_can_bring() -> None:
    def length(num_drafted: int) -> int:
        controls = controller(draft_ms=3.0)
        for _ in range(300):
            steps = controls.steps_for(8)
            controls.observe(8, [steps] * num_drafted if steps else [], steps)
        return int(controls.state()["slots"]["1"]["steps"]["8"])

    assert (length(8), length(1)) == (3, 0)


def test_the_first_rounds_have_the_length_that_was_asked_for() -> None:
    config = {"candidate_steps": list(LADDER)}
    assert [
        AdaptiveController.from_config(config, initial_steps=k).steps_for(4) for k in LADDER
    ] == [
        0,
        1,
        2,
        3,
    ]


def test_longer_contexts_add_the_same_time_to_all_lengths_that_were_measured_with_empty_ones() -> (
    None
):
    times = CorrectedRoundTimes(
        LinearTimes(4.0, of_empty_contexts=True), LADDER, RoundTimeOptions()
    )
    for _ in range(500):
        times.observe(1, 0, 0.040)  # four times what was measured
    assert times.row(1)[0] == pytest.approx(0.040, rel=0.01)
    assert times.row(1)[3] == pytest.approx(0.052, rel=0.01)
    assert times.state()["1"]["3"] == pytest.approx(52, rel=0.01)


def test_longer_contexts_add_most_to_lengths_that_took_longest_over_them() -> None:
    added = {0: 0.001, 1: 0.0015, 2: 0.002, 3: 0.0025}
    source = MeasuredRoundTimes(
        {1: {0: 0.01, 1: 0.011, 2: 0.012, 3: 0.013}}, of_empty_contexts=True, contexts={1: added}
    )
    times = CorrectedRoundTimes(source, LADDER, RoundTimeOptions())
    for _ in range(500):
        times.observe(1, 0, 0.012)  # contexts of twice the length
    assert times.row(1) == pytest.approx({0: 0.012, 1: 0.014, 2: 0.016, 3: 0.018}, rel=0.01)


@pytest.mark.parametrize("wrong", LADDER[:-1])
def test_one_difference_of_times_that_is_off_decides_for_no_length(wrong: int) -> None:
    """Too long a time of the longest alone cannot be told from contexts that cost wider windows
    more."""
    own, added = {0: 0.01, 1: 0.011, 2: 0.012, 3: 0.013}, dict.fromkeys(LADDER, 0.001)
    source = MeasuredRoundTimes(
        {1: own}, of_empty_contexts=True, contexts={1: added | {wrong: 0.0015}}
    )
    times = CorrectedRoundTimes(source, LADDER, RoundTimeOptions())
    for _ in range(500):
        times.observe(1, 0, 0.012)
    for steps in LADDER:  # were it believed, the wrong length would be off by half of what contexts add, or by a third
        assert times.row(1)[steps] - own[steps] == pytest.approx(0.002, rel=0.25)


@pytest.mark.parametrize(
    "added", [{0: 0.001, 1: 0.001, 2: 0.001, 3: -0.0005}, dict.fromkeys(LADDER, -0.001)]
)
def test_a_difference_of_times_that_cannot_be_is_not_believed(added: dict[int, float]) -> None:
    own = {0: 0.01, 1: 0.011, 2: 0.012, 3: 0.013}
    source = MeasuredRoundTimes({1: own}, of_empty_contexts=True, contexts={1: added})
    times = CorrectedRoundTimes(source, LADDER, RoundTimeOptions())
    for _ in range(500):
        times.observe(1, 0, 0.012)
    assert all(times.row(1)[steps] > 1.02 * own[steps] for steps in LADDER)


def test_times_with_contexts_make_up_for_errors_of_those_without() -> None:
    """Both are measured, each with an error of its own; what counts is how lengths compare, here 0
    and 2."""
    true = {steps: 0.010 + 0.001 * steps for steps in (*LADDER, 5, 7)}
    chance, errors = Random(0), [0.0, 0.0]

    def measured(added: float) -> dict[int, float]:
        return {steps: (time + added) * chance.gauss(1, 0.01) for steps, time in true.items()}

    for _ in range(300):
        empty, full = measured(0.0), measured(0.002)
        contexts = {steps: full[steps] - time for steps, time in empty.items()}
        source = MeasuredRoundTimes({1: empty}, of_empty_contexts=True, contexts={1: contexts})
        believed = CorrectedRoundTimes(source, tuple(true), RoundTimeOptions()).row(1)
        for place, row in enumerate((empty, believed)):
            errors[place] += (row[2] / row[0] - true[2] / true[0]) ** 2
    assert (errors[1] / errors[0]) ** 0.5 < 0.85


def test_nonsense_measured_with_contexts_leaves_times_near_those_without() -> None:
    own, added = {0: 0.01, 1: 0.011, 2: 0.012, 3: 0.013}, {0: 0.2, 1: 0.001, 2: 0.001, 3: 0.001}
    source = MeasuredRoundTimes({1: own}, of_empty_contexts=True, contexts={1: added})
    row = CorrectedRoundTimes(source, LADDER, RoundTimeOptions()).row(1)
    assert all(0.5 * own[steps] <= row[steps] <= 2 * own[steps] for steps in LADDER)


def test_rounds_faster_than_measured_with_empty_contexts_leave_all_times_above_zero() -> None:
    times = CorrectedRoundTimes(
        LinearTimes(4.0, of_empty_contexts=True), LADDER, RoundTimeOptions()
    )
    for _ in range(500):
        times.observe(1, 3, 0.003)
    assert min(times.row(1).values()) > 0


def test_a_slower_machine_stretches_all_lengths_alike() -> None:
    times = CorrectedRoundTimes(LinearTimes(1.0), LADDER, RoundTimeOptions())
    for _ in range(500):
        times.observe(1, 3, 0.026)  # twice what was measured
    row = times.row(1)
    assert row[3] / row[0] == pytest.approx(1.3, rel=0.02)
    assert times.state()["1"]["0"] == pytest.approx(20, rel=0.02)


def test_a_length_whose_time_was_measured_wrong_is_found_out_once_others_are_played_too() -> None:
    times = CorrectedRoundTimes(LinearTimes(1.0), LADDER, RoundTimeOptions())
    for _ in range(2000):
        times.observe(1, 3, 0.0169)  # 1.3 times as long as measured
        times.observe(1, 0, 0.010)
    assert times.row(1)[3] / times.row(1)[0] == pytest.approx(1.69, rel=0.05)


def test_one_round_that_took_a_second_does_not_change_the_times_much() -> None:
    times = CorrectedRoundTimes(LinearTimes(1.0), LADDER, RoundTimeOptions())
    for seconds in [*[0.013] * 100, 1.0]:
        times.observe(1, 3, seconds)
    assert times.state()["1"]["3"] == pytest.approx(13, rel=0.07)


def test_times_between_measured_ones_lie_on_a_line() -> None:
    times = MeasuredRoundTimes.from_json(
        {"round_ms": {"4": {"0": 4, "2": 6}, "8": {"0": 8, "2": 14}}}
    )
    at: Sequence[tuple[int, int]] = [(4, 0), (4, 1), (6, 2), (1, 0), (16, 2)]
    assert [times.round_time(*cell) * 1e3 for cell in at] == pytest.approx([4, 5, 10, 4, 30])


@pytest.mark.parametrize(
    "tree", [[], {}, {"round_ms": {}}, {"round_ms": {"1": 3}}, {"round_ms": {"1": {"0": 0}}}]
)
def test_round_times_that_cannot_be_meant_are_refused(tree: object) -> None:
    with pytest.raises(ValueError, match="round times"):
        MeasuredRoundTimes.from_json(tree)


def test_a_limit_leaves_the_best_of_the_shorter_lengths() -> None:
    controls = controller(limits=DraftLenLimits(schedule={4: 2, 16: 0}))
    play(controls, 300, 3)
    assert [controls.steps_for(size) for size in (1, 3, 4, 15, 16)] == [3, 3, 2, 2, 0]
    assert max(play(controls, 3000, 3, batch_size=4)) == 2
    assert set(play(controls, 3000, 3, batch_size=16)) == {0}


def test_a_closed_gate_ends_drafting_and_its_window_opens_it_again() -> None:
    controls = controller(limits=DraftLenLimits(gate=AcceptanceGate(0.5, 4)), switch_margin=0.0)
    play(controls, 100, 3)
    closed = play(controls, 30, 0)
    assert closed[0] == 3 and set(closed[12:]) == {0}
    assert play(controls, 1000, 3)[-1] == 3
