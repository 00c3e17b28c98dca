"""`strategy: cost_model`: which draft length it chooses."""

import logging
from itertools import groupby, pairwise
from random import Random

import pytest

from tests.executor.played_rounds import LADDER, LinearTimes, controller, play, settled
from tests.executor.simulated_trees import by_rank, draw, expected, num_accepted
from tllm_spec.config.adaptive_config import AdaptiveConfig
from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN, DraftShape, DraftShapes, chain_of
from tllm_spec.executor.speculative.draft_length.adaptive import (
    AdaptiveController,
    DraftLenTable,
)
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.estimates import (
    AcceptanceEstimate,
    chain_counts,
    columns_of,
)
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes


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


# Probes of the cost model: when one starts, what it may cost, how it ends.


def probe_of(controls: AdaptiveController) -> int | None:
    """The length that is probed at this moment."""
    probe = controls.state()["slots"]["1"]["probe"]
    return None if probe is None else int(probe)


def lengths_of_probes(asked: list[int]) -> set[int]:
    """Rounds of each probe that begins and ends in `asked`, where the controller otherwise decodes
    without drafts."""
    runs = [(is_probe, len(list(rounds))) for is_probe, rounds in groupby(map(bool, asked))]
    return {length for is_probe, length in runs[1:-1] if is_probe}


@pytest.mark.parametrize("share", [0.005, 0.02])
def test_probes_cost_at_most_their_share_of_the_time_and_a_quarter_if_they_change_nothing(
    share: float,
) -> None:
    controls = controller(probe_time_share=share)
    shares = []
    for rounds in (800, 20_000):
        play(controls, 200, 0)
        asked = play(controls, rounds, 0)
        shares.append(sum(asked) * 0.1 / len(asked))  # a draft adds a tenth of a plain round
    assert shares[0] < 1.3 * share and 0.1 * share < shares[1] < 0.3 * share


def test_without_a_share_of_the_time_there_are_no_probes() -> None:
    controls = controller(probe_time_share=0.0)
    play(controls, 500, 0)
    assert set(play(controls, 3000, 3)) == {0}


def test_probes_are_rarer_where_they_add_more_time() -> None:
    def probed(draft_ms: float) -> int:
        controls = controller(draft_ms=draft_ms)
        play(controls, 1000, 0)
        return sum(steps > 0 for steps in play(controls, 20_000, 0))

    assert probed(8.0) < probed(1.0) / 3


def test_after_plain_decoding_good_drafts_are_found_again_by_a_probe() -> None:
    controls = controller()
    play(controls, 1000, 0)
    assert settled(controls) == 0
    play(controls, 1500, 3)
    assert settled(controls) == 3


def test_a_probe_ends_even_if_the_drafter_has_no_drafts() -> None:
    controls = controller()
    play(controls, 1000, 0)
    asked = []
    for _ in range(5000):
        asked.append(controls.tier_for(1))
        controls.observe(ObservedRound(1, [], 0))
    assert 0 < sum(steps > 0 for steps in asked) < 0.1 * len(asked)


def test_a_longer_length_that_cannot_win_is_not_probed() -> None:
    """At length 1 with a rate of 0.2, even sure further drafts bring 0.2 tokens each for 4 ms."""
    controls = controller(draft_ms=4.0, candidate_steps=[1, 2])
    asked = []
    for number in range(6000):
        steps = controls.tier_for(1)
        asked.append(steps)
        controls.observe(ObservedRound(1, [int(number % 5 == 0)], steps))
    assert set(asked[500:]) == {1}


def test_a_length_that_could_not_beat_the_margin_is_not_probed() -> None:
    """A sure draft would bring 1% more tokens per second."""

    def asked(margin: float) -> set[int]:
        controls = controller(draft_ms=9.8, switch_margin=margin, candidate_steps=[0, 1])
        play(controls, 500, 0)
        return set(play(controls, 20_000, 0))

    assert asked(0.05) == {0} and asked(0.0) == {0, 1}


def test_a_step_of_several_drafts_is_judged_by_all_of_them() -> None:
    """One token for 18 ms more would not pay, three do."""
    controls = controller(draft_ms=6.0, candidate_steps=[0, 3])
    play(controls, 500, 0)
    play(controls, 20_000, 3)
    assert settled(controls) == 3


def test_a_probe_comes_at_once_without_evidence_and_later_when_the_saved_time_pays_for_it() -> None:
    """A round of 10 ms saves 0.05 ms, half of that after a probe in vain, then a quarter. Each of
    four rounds takes 1 ms more, which the first probe owes, and one is spare."""
    asked = play(controller(prior_acceptance=0.0), 1000, 0)
    starts = [number for number, pair in enumerate(pairwise(asked), 1) if pair == (0, 1)]
    assert starts == pytest.approx([1, 1 + 9 / 0.025, 1 + 9 / 0.025 + 4 / 0.0125], abs=10)


def test_a_probe_ends_where_the_length_falls_below_what_it_began_from() -> None:
    """Otherwise no other would ever begin."""
    controls = controller(candidate_steps=[0, 1, 2, 3, 5, 7], probe_time_share=0.5)
    while controls.state()["slots"]["1"]["probe"] not in (5, 7):
        play(controls, 1, 3)
    play(controls, 100, 0)
    assert settled(controls) == 0 and 1 in play(controls, 1000, 0)


def test_saved_time_is_capped_so_that_hard_texts_after_easy_ones_see_few_probes() -> None:
    """The longest length has nothing to probe: 20,000 of its rounds would save the time of 110
    plain ones, of which 40 are kept. A draft takes a tenth of a plain round."""
    controls = controller(candidate_steps=[0, 1])
    play(controls, 20_000, 3, batch_size=16)
    assert controls.state()["slots"]["1"]["steps"]["16"] == 1
    play(controls, 100, 0, batch_size=16)
    assert controls.state()["slots"]["1"]["steps"]["16"] == 0
    assert sum(play(controls, 2000, 0, batch_size=16)) * 0.1 < 40 + 0.005 * 2000 + 1


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("batch_size", "rounds"), [(1, 4), (2, 4), (4, 2), (16, 1)])
def test_a_probe_ends_after_four_rounds_or_eight_requests(batch_size: int, rounds: int) -> None:
    controls = controller()
    play(controls, 4000, 0, batch_size)
    assert lengths_of_probes(play(controls, 5000, 0, batch_size)) == {rounds}


def test_rounds_of_a_probe_in_which_its_drafts_are_not_there_yet_do_not_count() -> None:
    """A round's drafts were made in the round before, so the first round has none."""
    controls = controller()
    play(controls, 4000, 0)
    asked = [0]
    for _ in range(5000):
        before = asked[-1]
        asked.append(controls.tier_for(1))
        verified = min(before, asked[-1])
        controls.observe(ObservedRound(1, [0] if verified else [], verified))
    assert lengths_of_probes(asked) == {5}


def test_a_convinced_probe_becomes_the_length_and_ends_at_once() -> None:
    controls = controller()
    play(controls, 1000, 0)
    convinced = False
    for _ in range(1500):
        before, probe = settled(controls), probe_of(controls)
        play(controls, 1, 3)
        now = settled(controls)
        if now > before:
            convinced = convinced or now == probe
            assert probe_of(controls) is None
    assert convinced and settled(controls) == 3


def test_a_batch_size_whose_limit_is_lower_takes_no_part_in_a_probe() -> None:
    controls = controller(table=DraftLenTable({1: 3, 4: 2}))
    play(controls, 600, 2)
    assert settled(controls) == controls.tier_for(4) == 2
    probed = 0
    for _ in range(5000):
        if probe_of(controls) == 3:
            assert (controls.tier_for(1), controls.tier_for(4)) == (3, 2)
            probed += 1
        play(controls, 1, 2)
    assert probed > 0


def test_pausing_requests_are_expected_to_gain_from_a_longer_length_too() -> None:
    """A probe also shows whether they draft again, so the time of all their drafts may pay."""

    def lengths_with(num_drafted: int) -> set[int]:
        controls = controller(draft_ms=12.0, candidate_steps=[1, 2])
        asked = []
        for _ in range(3000):
            asked.append(controls.tier_for(4))
            controls.observe(ObservedRound(4, [1] * num_drafted, asked[-1]))
        return set(asked[500:])

    assert lengths_with(4) == {1} and lengths_with(1) == {1, 2}


# Expected tokens of chains and trees from what paths showed, at a known acceptance.


LARGE, SMALL = DraftShape(3, 12, 4), DraftShape(2, 4, 3)
SHAPES = DraftShapes([chain_of(length) for length in range(4)], [LARGE, SMALL], LARGE)
TIER_ESTIMATE_LADDER = (0, 1, 3, 4, 5)
CHEAP = {"max_draft_len": 2, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 4}
FIRST = 0.55


def learned(tier: int) -> AcceptanceEstimate:
    """The estimate after rounds of one tier."""
    batch = 32
    trees = {4: SMALL, 5: LARGE}
    estimate, chance = AcceptanceEstimate(TIER_ESTIMATE_LADDER, 0.8, 4000.0, trees), Random(tier)
    for _ in range(150):
        ranks = [draw(chance, SHAPES.of(tier), FIRST) for _ in range(batch)]
        accepted = list(map(num_accepted, ranks))
        estimate.observe(ObservedRound(batch, accepted, tier, ranks=ranks), tier)
    return estimate


def test_tiers_after_the_lengths_are_trees_by_their_number_of_drafts() -> None:
    assert [SHAPES.of(tier) for tier in (3, 4, 5)] == [chain_of(3), SMALL, LARGE]
    assert [SHAPES.name(tier) for tier in (3, 4)] == [3, "2x3/4"]
    assert SHAPES.tier_of(LARGE) == 5 and SHAPES.longest == LARGE
    assert [SHAPES.tier_within(rows) for rows in (1, 4, 5, 13)] == [0, 3, 4, 5]


@pytest.mark.parametrize("tier", [4, 5])
def test_rounds_of_a_tree_tell_what_every_chain_and_tree_would_have_accepted(tier: int) -> None:
    estimate = learned(tier)
    for other in (1, 3, 4, 5):
        if SHAPES.of(other).depth <= SHAPES.of(tier).depth:
            truth = expected(SHAPES.of(other), FIRST) - 1
            assert estimate.expected[other] == pytest.approx(truth, rel=0.05)
    further = estimate.state()["further_children"]
    share = by_rank(FIRST, 2)[1] / (1 - FIRST)
    assert further[0] == pytest.approx(share, abs=0.04)


def test_a_chain_tells_its_own_acceptance_and_leaves_further_children_to_the_prior() -> None:
    estimate = learned(3)
    assert estimate.expected[3] == pytest.approx(expected(chain_of(3), FIRST) - 1, rel=0.05)
    assert estimate.state()["further_children"] == [0.35, 0.2333, 0.175]


def test_trees_that_accept_more_than_their_rates_predict_gain() -> None:
    estimate = learned(5)
    assert estimate.gain == pytest.approx(1.0, abs=0.05)
    before = estimate.expected[4] / estimate.gain
    ended = [END + 4, NOTHING, NOTHING, NOTHING]  # what the rates say stays the same
    for _ in range(100):
        estimate._compare(5, [3] * 32)
    estimate.observe(ObservedRound(1, [0], 5, ranks=[ended]), 5)
    assert estimate.gain > 1.3
    assert estimate.expected[4] == pytest.approx(before * estimate.gain, rel=0.1)
    for _ in range(2000):
        estimate.observe(ObservedRound(1, [], 0), 0)
    assert estimate.gain == pytest.approx(1.0, abs=0.05), "trees are tried again some day"


def test_a_path_that_left_the_first_children_tells_a_chain_where_it_would_have_ended() -> None:
    rows = [
        [0, 1, OFF_CHAIN + 0, OFF_CHAIN + END],  # a chain would have accepted one of two tried
        [0, 0, END, NOTHING],  # two of two: the tree ended there
        [END + 3, NOTHING, NOTHING, NOTHING],
    ]
    assert chain_counts(columns_of(rows)) == [(3, 2), (2, 1), (0, 0), (0, 0)]


def test_a_probe_of_a_tree_that_takes_less_time_pays_for_the_tokens_that_it_lacks() -> None:
    config = AdaptiveConfig.parse({"candidate_steps": [3], "candidate_trees": [CHEAP]}, 3)
    times = MeasuredRoundTimes({8: {0: 9.0, 1: 9.2, 2: 9.4, 3: 10.0, 4: 9.5}})
    shapes = DraftShapes([chain_of(length) for length in range(4)], [SMALL], LARGE)
    own = AdaptiveController.from_config(config, round_times=times, shapes=shapes)
    chance, asked = Random(1), []
    for _ in range(1500):
        asked.append(own.tier_for(8))
        ranks = [draw(chance, shapes.of(asked[-1]), 0.75) for _ in range(8)]
        own.observe(ObservedRound(8, list(map(num_accepted, ranks)), asked[-1], ranks=ranks))
    assert own.state()["slots"]["1"]["steps"] == {"8": 3}
    assert asked[500:].count(4) < 0.2 * 1000


def test_where_first_children_are_never_right_the_others_are_soon_given_up() -> None:
    """In milliseconds of an H200, batch 1. A tree with eight children at its root would win if
    these were as good as before any was seen; to see each of them often would take 16 rounds."""
    tree, none = DraftShape(5, 31, 8), [END + 8, *[NOTHING] * 4]
    shapes = DraftShapes([chain_of(length) for length in range(6)], [tree], tree)
    times = MeasuredRoundTimes({1: {0: 3.82, 1: 4.09, 2: 4.32, 3: 4.54, 5: 5.03, 6: 5.97}})
    config = {"1": {"candidate_steps": [0, 1, 2, 3, 5]}}
    own, asked = AdaptiveController.from_config(config, round_times=times, shapes=shapes), []
    for _ in range(2000):
        asked.append(tier := own.tier_for(1))
        ranks = [] if not tier else [none if tier == 6 else [END + 1, *[NOTHING] * 4]]
        own.observe(ObservedRound(1, [0] if tier else [], tier, ranks=ranks))
    assert 0 < asked.count(6) < 12 and 1 in asked[100:]


# Log lines of the draft length: one a switch, none for probes.


@pytest.mark.parametrize(
    "config",
    [
        {"candidate_steps": [0, 1, 2, 3], "window_trials": 32, "probe_time_share": 0.2},
        {"strategy": "ema", "1": {"candidate_steps": [1, 3]}},
    ],
)
def test_every_switch_is_one_line_with_its_reason(
    config: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    controller = AdaptiveController.from_config(config)
    with caplog.at_level(logging.INFO):
        for num_accepted in (3, 0, 3, 0):
            play(controller, 300, num_accepted)
    lines = [record.getMessage() for record in caplog.records]
    decisions = controller.state()["decisions"]
    assert len(lines) == decisions["num_switches"] >= 3
    last = decisions["last"][-1]
    assert lines[-1].startswith(
        f"draft length {last['old_steps']} -> {last['new_steps']} at batch size 1"
    )
    assert lines[-1].endswith(last["reason"])


def test_probes_write_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    controller = AdaptiveController.from_config(
        {"strategy": "cost_model", "candidate_steps": [0, 1, 2, 3]}
    )
    play(controller, 1000, 0)
    with caplog.at_level(logging.INFO):
        asked = play(controller, 4000, 0)
    assert sum(steps > 0 for steps in asked) > 10, "there were probes"
    assert not caplog.records


def test_a_limit_that_no_length_of_the_ladder_meets_is_a_switch_there_and_back() -> None:
    limits = DraftLenTable(gate=(1.0, 5))
    controller = AdaptiveController.from_config({"candidate_steps": [1, 3]}, table=limits)
    play(controller, 600, 0)
    switches = controller.state()["decisions"]["last"]
    steps = [(switch["old_steps"], switch["new_steps"]) for switch in switches]
    assert steps == list(pairwise([steps[0][0], *(new for _, new in steps)]))
    assert (1, 0) in steps and (0, 1) in steps
    assert all(
        switch["reason"].startswith("a limit")
        for switch in switches
        if 0 in (switch["old_steps"], switch["new_steps"])
    )
