"""Probes of the cost model: how long one lasts, when the next one comes, and what they may cost."""

from itertools import groupby

import pytest

from tests.executor.played_rounds import controller, play, settled
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController


def late_rounds(controls: AdaptiveController, rounds: int, accepted: list[int]) -> list[int]:
    """Rounds of one request in which drafts are there one round after they were asked for;
    `accepted`, over and over. The lengths that were asked for."""
    asked, ready, number = [], 0, 0
    for _ in range(rounds):
        steps = controls.steps_for(1)
        verified, ready = min(steps, ready), steps
        asked.append(steps)
        controls.observe(
            1, [min(accepted[number % len(accepted)], verified)] if verified else [], verified
        )
        number += verified > 0
    return asked


def runs(asked: list[int]) -> list[tuple[bool, int]]:
    """Whether there were drafts, and for how many rounds on end."""
    return [(drafted, len(list(rounds))) for drafted, rounds in groupby(asked, bool)]


def first_probe(asked: list[int]) -> int:
    return next(length for drafted, length in runs(asked) if drafted)


def after_hopeless_rounds(draft_ms: float = 8.0, **keys: float) -> AdaptiveController:
    controls = controller(draft_ms, **keys)
    late_rounds(controls, 2000, [0])
    assert settled(controls) == 0
    return controls


def test_a_probe_ends_with_the_first_draft_in_vain() -> None:
    assert (
        first_probe(late_rounds(after_hopeless_rounds(), 450, [0])) == 2
    )  # the first round finds no drafts


def test_a_probe_that_has_won_enough_survives_a_draft_in_vain() -> None:
    asked = late_rounds(after_hopeless_rounds(draft_ms=3.0), 450, [1, 0])
    assert first_probe(asked) > 4


def test_a_probe_whose_drafts_are_accepted_lasts_until_it_convinces() -> None:
    controls = after_hopeless_rounds()
    asked = late_rounds(controls, 450, [1])
    assert settled(controls) == 1
    assert runs(asked)[-1] == (True, first_probe(asked)), (
        "it goes over into drafting without a pause"
    )


def test_rounds_that_win_are_not_charged_and_come_to_an_end() -> None:
    controls = after_hopeless_rounds(
        window_trials=1e9, change_excess=1e9, prior_weight=1e6
    )  # nothing convinces

    def credit() -> float:
        return float(controls.state()["slots"]["1"]["probe_rounds_saved_up"])

    while not controls.steps_for(1):
        controls.observe(1, [], 0)
    before = credit()
    assert runs(late_rounds(controls, 34, [1])) == [(True, 33), (False, 1)], (
        "the first finds no drafts, 32 win"
    )
    assert before - credit() == pytest.approx(1, abs=0.02)


def test_probes_in_vain_follow_each_other_at_growing_distances() -> None:
    controls = controller()
    play(controls, 1000, 3)  # saves up
    asked = play(controls, 1500, 0)
    last_given_up = max(at for at, steps in enumerate(asked) if steps > 1)
    pauses = [length for drafted, length in runs(asked[last_given_up:]) if not drafted][:-1]
    assert pauses[:4] == pytest.approx([8, 8, 16, 32], abs=1)
    assert max(pauses) <= 250, "they never end"


def test_a_drafter_that_comes_back_soon_is_found_again_soon() -> None:
    controls = controller(plain_after_win=0.0)
    play(controls, 1000, 3)
    play(controls, 150, 0)
    assert settled(controls) == 0
    assert next(n for n, steps in enumerate(late_rounds(controls, 300, [3])) if steps == 3) < 120


def time_for_probes(rounds: int, share: float, *, is_told: bool) -> float:
    """Rounds of a draft model on the target's pages that is never right, and reads before a probe
    what it has missed, which takes `share` of the time in which it was generated. What probes and
    reading added to plain rounds' time."""
    controls, missed, added = controller(draft_ms=2.0), 0, 0.0
    for _ in range(rounds):
        steps = controls.steps_for(1)
        reading = 0.010 * share * missed if steps else 0.0
        if steps and missed:  # it has no drafts yet
            told = 0.010 + 0.002 * steps + reading if is_told else None
            controls.observe(1, [], 0, return_seconds=told)
        else:
            controls.observe(1, [0] if steps else [], steps, 0.010 + 0.002 * steps)
        missed = 0 if steps else missed + 1
        added += reading + 0.002 * steps
    return added / (rounds * 0.010)


def test_reading_before_a_probe_is_paid_for_by_rarer_probes() -> None:
    told, untold = (time_for_probes(20_000, 0.03, is_told=is_told) for is_told in (True, False))
    assert told < 0.5 * untold and untold > 0.03


def test_a_hiccup_of_the_machine_at_a_return_does_not_end_probes() -> None:
    controls = after_hopeless_rounds(draft_ms=2.0)
    for seconds in (0.020, 60.0):
        while not controls.steps_for(1):
            controls.observe(1, [], 0, 0.010)
        controls.observe(1, [], 0, return_seconds=seconds)
        while controls.steps_for(1):
            controls.observe(1, [0], 1, 0.012)
    later = late_rounds(controls, 10_000, [0])
    assert sum(drafted for drafted, _ in runs(later)) > 2
