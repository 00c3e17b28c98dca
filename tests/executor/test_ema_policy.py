"""`strategy: ema` against sequences of decisions computed from SGLang's rule by hand."""

from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any

import pytest

from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound

Decision = tuple[int, int, int, float]  # round, old length, new length, smoothed accepted drafts


def controller(ladder: list[int], initial_steps: int, **keys: Any) -> AdaptiveController:
    slots = {"strategy": "ema", "1": {"candidate_steps": ladder, **keys}}
    return AdaptiveController.from_config(slots, initial_steps=initial_steps)


def ema(controls: AdaptiveController) -> float:
    return float(controls.state()["slots"]["1"]["ema_accept_len"])


def decisions(
    controls: AdaptiveController, accepted: Iterable[Callable[[int], list[int]]]
) -> list[Decision]:
    """Every round's accepted drafts are a function of the present length."""
    found = []
    for number, accept in enumerate(accepted, start=1):
        steps = controls.tier_for(1)
        if controls.observe(ObservedRound(1, accept(steps))):
            found.append((number, steps, controls.tier_for(1), round(ema(controls), 4)))
    return found


def always(accept: Callable[[int], int], rounds: int) -> Iterable[Callable[[int], list[int]]]:
    return repeat(lambda steps: [accept(steps)], rounds)


def all_of(steps: int) -> int:
    return steps


def none_of(steps: int) -> int:
    return 0


def test_t1_full_acceptance_rises_one_rung_and_stays() -> None:
    assert decisions(controller([1, 3, 7], 3), always(all_of, 200)) == [(15, 3, 7, 2.9648)]


def test_t2_no_acceptance_falls_two_rungs_at_once() -> None:
    assert decisions(controller([1, 3, 7], 7), always(none_of, 200)) == [(15, 7, 1, 0.2111)]


def test_t3_forty_good_rounds_then_forty_bad_ones() -> None:
    halves = chain.from_iterable(
        [*always(lambda k: min(k, 6), 40), *always(none_of, 40)] for _ in range(2)
    )
    assert decisions(controller([1, 3, 7], 3), halves) == [
        (15, 3, 7, 2.9648),
        (45, 7, 3, 1.9623),
        (55, 3, 1, 0.2107),
        (85, 1, 3, 0.6726),
        (95, 3, 7, 2.7501),
        (125, 7, 3, 1.9621),
        (135, 3, 1, 0.2107),
    ]


def test_t4_a_zero_rung_is_left_at_every_decision() -> None:
    found = decisions(controller([0, 1], 3, down_hysteresis=0.0), always(none_of, 40))
    assert [each[:3] for each in found] == [
        (15, 1, 0), (20, 0, 1), (25, 1, 0), (30, 0, 1), (35, 1, 0), (40, 0, 1)
    ]  # fmt: skip


def test_t5_full_acceptance_of_one_draft_changes_nothing() -> None:
    assert decisions(controller([0, 1], 1, down_hysteresis=0.0), always(all_of, 100)) == []


def test_t6_rises_ignore_the_ceiling_so_a_cycle_remains() -> None:
    capped = controller([1, 3], 3, ceiling_coeff=1.67)
    found = decisions(capped, always(lambda k: min(1, k), 25))
    assert found == [(15, 3, 1, 1.0352), (20, 1, 3, 1.0115), (25, 3, 1, 1.0038)]
    assert decisions(controller([1, 3], 3), always(lambda k: min(1, k), 100)) == []


def test_t7_the_ceiling_takes_one_rung_away() -> None:
    found = decisions(controller([1, 3, 7], 7, ceiling_coeff=3.0), repeat(lambda k: [1, 2], 15))
    assert found == [(15, 7, 3, 1.6583)]


def test_the_mixed_trace_of_batches_of_two_to_six_digits() -> None:
    batches = [
        (3, 1),
        (2, 2),
        (0, 3),
        (3, 3),
        (3, 3),
        (1, 0),
        (3, 2),
        (3, 3),
        (2, 3),
        *[(3, 3)] * 6,
    ]
    batches += [(7, 5), (4, 4), (2, 2), (1, 1), (0, 0), *[(0, 0)] * 5]
    controls = controller([1, 3, 7], 3)
    emas, switches = [], []
    for number, batch in enumerate(batches, start=1):
        if controls.observe(ObservedRound(2, list(batch))):
            switches.append((number, controls.tier_for(2)))
        emas.append(round(ema(controls), 6))
    first = [
        2,
        2,
        1.9,
        2.12,
        2.296,
        1.9368,
        2.04944,
        2.239552,
        2.291642,
        2.433313,
        2.546651,
        2.63732,
    ]
    assert emas[:15] == [*first, 2.709856, 2.767885, 2.814308]
    assert emas[15:20] == [3.451446, 3.561157, 3.248926, 2.799141, 2.239312]
    assert emas[24] == 0.733778 and switches == [(15, 7), (20, 3)]


@pytest.mark.parametrize(
    ("initial", "keys", "mean", "expected"),
    [
        (3, {}, 2.5, 3),  # a rise needs more than half a draft below the rung that is left
        (3, {}, 3, 7),
        (3, {"down_hysteresis": 0.0}, 0.5, 1),  # equality moves down
        (3, {"up_hysteresis": 0.75}, 3, 3),
        (3, {"up_hysteresis": 0.75}, 4, 7),
        (7, {"down_hysteresis": -0.75}, 2, 7),
        (7, {"down_hysteresis": -0.75}, 1, 3),
    ],
)
def test_thresholds_lie_half_a_draft_below_a_rung(
    initial: int, keys: dict[str, float], mean: float, expected: int
) -> None:
    controls = controller(
        [1, 3, 7], initial, ema_alpha=1, warmup_batches=0, update_interval=1, **keys
    )
    low = int(mean)
    controls.observe(ObservedRound(1, [low, low] if mean == low else [low, low + 1]))
    assert controls.tier_for(1) == expected


def test_a_launch_value_outside_the_ladder_starts_in_its_middle() -> None:
    controls = controller([1, 3, 7], 2)
    assert controls.tier_for(1) == 3 and ema(controls) == 2.0


def test_without_a_launch_value_the_middle_of_all_ladders_is_taken() -> None:
    assert AdaptiveController.from_config("newest").tier_for(1) == 3


def test_zero_is_left_with_any_input_and_keeps_a_known_average() -> None:
    fast = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1, "down_hysteresis": 0.0}
    controls = controller([0, 3], 3, **fast)
    assert decisions(controls, always(none_of, 3)) == [
        (1, 3, 0, 0.0),
        (2, 0, 3, 0.0),
        (3, 3, 0, 0.0),
    ]
    from_zero = controller([0, 3], 0, **fast)
    assert ema(from_zero) == -1.0
    assert decisions(from_zero, always(none_of, 1)) == [(1, 0, 3, 2.0)]


def test_an_empty_round_does_not_count() -> None:
    controls = controller([1, 3, 7], 3)
    found = [controls.observe(ObservedRound(1, [])) for _ in range(30)]
    assert not any(found) and controls.state()["slots"]["1"]["num_rounds"] == 0


def test_batches_are_padded_to_graphs_before_they_find_their_slot() -> None:
    slots = {"strategy": "ema", **{low: {"candidate_steps": [low]} for low in (1, 8, 32)}}
    padded = AdaptiveController.from_config(slots, graph_batch_sizes=[1, 2, 4, 8, 16, 32])
    assert [padded.tier_for(size) for size in (1, 4, 5, 9, 17, 33)] == [1, 1, 8, 8, 32, 32]
    raw = AdaptiveController.from_config(slots)
    assert [raw.tier_for(size) for size in (5, 17, 32)] == [1, 8, 32]
    late = AdaptiveController.from_config({"strategy": "ema", 4: {"candidate_steps": [2]}})
    assert late.tier_for(1) == 2


def test_slots_learn_from_their_own_batches_only() -> None:
    ladder = {"candidate_steps": [1, 3, 7]}
    controls = AdaptiveController.from_config(
        {"strategy": "ema", 1: ladder, 8: ladder}, initial_steps=3
    )
    for _ in range(15):
        controls.observe(ObservedRound(9, [3] * 9))
    assert (controls.tier_for(7), controls.tier_for(8)) == (3, 7)


def stale_after_a_rise(**keys: Any) -> float:
    fast = {"warmup_batches": 0, "update_interval": 1, "down_hysteresis": 0.0}
    controls = controller([0, 3], 0, **fast, **keys)
    assert controls.observe(ObservedRound(1, [0], verified_tier=0)) and controls.tier_for(1) == 3
    controls.observe(ObservedRound(1, [0], verified_tier=0))  # was under way when the length rose
    return ema(controls)


def test_a_stale_round_of_a_shorter_length_does_not_count() -> None:
    assert stale_after_a_rise() == 2.0


def test_compat_counts_a_stale_round_as_the_present_length_s() -> None:
    config = {"strategy": "ema", "compat": True, "warmup_batches": 0, "update_interval": 1}
    controls = AdaptiveController.from_config(
        {**config, "1": {"candidate_steps": [0, 3]}}, initial_steps=0
    )
    controls.observe(ObservedRound(1, [0], verified_tier=0))
    controls.observe(ObservedRound(1, [0], verified_tier=0))
    assert ema(controls) == pytest.approx(1.6)


def test_a_stale_round_of_a_longer_length_shows_what_the_present_one_would_have() -> None:
    fast = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1}
    controls = controller([1, 7], 7, **fast)
    assert controls.observe(ObservedRound(2, [0, 0], verified_tier=7)) and controls.tier_for(2) == 1
    controls.observe(ObservedRound(2, [5, 0], verified_tier=7))
    assert ema(controls) == 0.5
