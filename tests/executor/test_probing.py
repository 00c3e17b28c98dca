"""Probes of the cost model: when one starts, what it may cost, how it ends."""

from itertools import groupby

import pytest

from tests.executor.played_rounds import controller, play, settled
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, DraftLenTable
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound


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
def test_probes_cost_their_share_of_the_time(share: float) -> None:
    controls = controller(probe_time_share=share)
    play(controls, 500, 0)
    asked = play(controls, 20_000, 0)
    drafted = sum(steps for steps in asked)  # each draft adds a tenth of a plain round
    assert 0.4 * share < drafted * 0.1 / len(asked) < 1.1 * share


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


def test_a_probe_starts_when_the_saved_time_pays_for_all_of_its_rounds() -> None:
    """A round of 10 ms saves 0.05 ms. Four rounds and a spare one add 1 ms each."""
    asked = play(controller(prior_acceptance=0.0), 200, 0)
    assert asked.index(1) == pytest.approx(100, abs=2)


def test_saved_time_is_capped_so_that_hard_texts_after_easy_ones_see_few_probes() -> None:
    """The longest length has nothing to probe: 20,000 of its rounds would save the time of 110
    plain ones, of which 40 are kept. A draft takes a tenth of a plain round."""
    controls = controller(candidate_steps=[0, 1])
    play(controls, 20_000, 3, batch_size=16)
    assert controls.state()["slots"]["1"]["steps"]["16"] == 1
    play(controls, 100, 0, batch_size=16)
    assert controls.state()["slots"]["1"]["steps"]["16"] == 0
    assert sum(play(controls, 2000, 0, batch_size=16)) * 0.1 < 40 + 0.005 * 2000 + 1


@pytest.mark.parametrize(("batch_size", "rounds"), [(1, 4), (2, 4), (4, 2), (16, 1)])
def test_a_probe_ends_after_four_rounds_or_eight_requests(batch_size: int, rounds: int) -> None:
    controls = controller()
    play(controls, 500, 0, batch_size)
    assert lengths_of_probes(play(controls, 5000, 0, batch_size)) == {rounds}


def test_rounds_of_a_probe_in_which_its_drafts_are_not_there_yet_do_not_count() -> None:
    """A round's drafts were made in the round before, so the first round has none."""
    controls = controller()
    play(controls, 500, 0)
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
