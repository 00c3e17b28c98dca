"""`strategy: cost_model`: which draft length it chooses."""

import pytest

from tests.executor.played_rounds import LADDER, LinearTimes, controller, play, settled
from tllm_spec.executor.speculative.draft_length.adaptive import (
    AdaptiveController,
    DraftLenTable,
)
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound


@pytest.mark.parametrize(("num_accepted", "expected"), [(0, 0), (1, 1), (2, 2), (3, 3)])
def test_the_length_settles_on_what_is_accepted(num_accepted: int, expected: int) -> None:
    controls = controller()
    play(controls, 600, num_accepted)
    assert settled(controls) == expected


def test_drafts_that_cost_more_than_they_can_bring_are_not_made() -> None:
    dear = controller(draft_ms=11.0)  # even a sure draft brings only 10 ms
    assert set(play(dear, 3000, 3)[100:]) == {0}


def test_a_longer_length_must_beat_the_present_one_by_the_margin() -> None:
    def switches(margin: float) -> int:
        controls = controller(
            draft_ms=5.0, switch_margin=margin, window_trials=32.0, probe_time_share=0.0
        )
        for number in range(400):  # half of the first drafts: one brings as much as it costs
            steps = controls.tier_for(1)
            controls.observe(ObservedRound(1, [number % 2 if steps else 0], max(steps, 1)))
        return int(controls.state()["decisions"]["num_switches"])

    assert switches(0.3) < switches(0.0) / 4


def test_drafts_that_are_never_right_cost_little_from_the_first_round_on() -> None:
    asked = play(controller(), 1000, 0)
    assert sum(asked) * 0.1 < 0.02 * len(asked)


def test_a_ladder_of_plain_decoding_only_may_be_told_of_drafts() -> None:
    controls = controller(candidate_steps=[0])
    assert controls.tier_for(1) == 0
    controls.observe(ObservedRound(1, [2], 3))
    assert controls.tier_for(1) == 0


def test_asking_twice_gives_the_same_answer() -> None:
    one, two = controller(), controller()
    for number in range(2000):
        steps = one.tier_for(1)
        assert two.tier_for(1) == two.tier_for(1) == steps
        for each in (one, two):
            each.observe(ObservedRound(1, [min(steps, number // 100 % 4)] if steps else [], steps))


def test_a_change_is_reported_once_and_kept_with_its_reason() -> None:
    controls = controller()
    changes = []
    for _ in range(300):
        steps = controls.tier_for(1)
        if (
            controls.observe(ObservedRound(1, [0] if steps else [], steps))
            and controls.state()["slots"]["1"]["probe"] is None
        ):
            changes.append(controls.tier_for(1))
    last = controls.state()["decisions"]["last"]
    assert (
        last
        and last[-1]["new_steps"] == 0
        and "acceptance given the drafts before" in last[-1]["reason"]
    )
    assert 0 in changes


def test_requests_that_pause_lower_what_drafts_can_bring() -> None:
    def settled_with(drafted: int) -> int:
        controls = controller(draft_ms=2.0)
        for _ in range(400):
            steps = controls.tier_for(4)
            controls.observe(ObservedRound(4, [min(steps, 1)] * drafted if steps else [], steps))
        return int(controls.state()["slots"]["1"]["steps"]["4"])

    assert settled_with(4) == 1 and settled_with(0) in (0, 1) and settled_with(1) == 1
    costly = controller(draft_ms=4.0)
    for _ in range(400):
        steps = costly.tier_for(4)
        costly.observe(ObservedRound(4, [min(steps, 1)] if steps else [], steps))
    assert costly.state()["slots"]["1"]["steps"]["4"] == 0


def test_every_batch_size_has_its_own_length_and_shares_the_estimate() -> None:
    class Batched(LinearTimes):
        def round_time(self, batch_size: int, tier: int) -> float:
            return (10 + self.draft_ms * tier * batch_size) / 1e3

    controls = AdaptiveController.from_config(
        {"candidate_steps": list(LADDER)}, round_times=Batched(1.0)
    )
    play(controls, 400, 3, batch_size=1)
    assert [controls.tier_for(size) for size in (1, 4, 16)] == [3, 3, 0]
    play(controls, 400, 0, batch_size=1)
    assert controls.tier_for(4) == 0


def test_longer_contexts_than_the_measured_ones_make_drafts_pay() -> None:
    """Three of ten drafts are accepted: not worth 4 ms of 14, but 4 ms of 114."""

    def settled_with(*, has_contexts: bool) -> int:
        controls = controller(draft_ms=4.0, has_contexts=has_contexts)
        for number in range(3000):
            steps = controls.tier_for(1)
            accepted = [min(steps, number % 10 < 3)] if steps else []
            controls.observe(ObservedRound(1, accepted, steps, seconds=0.110 + 0.004 * steps))
        return settled(controls)

    assert settled_with(has_contexts=True) >= 1 > settled_with(has_contexts=False)


def test_a_limit_leaves_the_best_of_the_shorter_lengths_and_no_probe_exceeds_it() -> None:
    controls = controller(table=DraftLenTable({1: 2}))
    asked = []
    for _ in range(3000):
        asked += play(controls, 1, 3)
        assert controls.state()["slots"]["1"]["probe"] in (None, 1, 2)
    assert max(asked) == 2 == controls.tier_for(1)


def test_a_closed_gate_ends_drafting_and_its_window_opens_it_again() -> None:
    controls = controller(table=DraftLenTable(gate=(1.0, 5)))
    asked = play(controls, 3000, 1)
    closed = asked.index(0)
    assert closed < 50 and set(asked[closed : closed + 400]) == {0}
    assert max(asked[closed : closed + 600]) > 0


def test_a_gate_that_closes_in_one_batch_size_ends_drafting_in_all() -> None:
    controls = controller(table=DraftLenTable(gate=(1.0, 5)))
    assert controls.tier_for(8) > 0
    play(controls, 5, 1, batch_size=4)
    assert controls.tier_for(8) == 0
