"""`strategy: ema` against sequences of decisions computed from SGLang's rule by hand."""

from collections.abc import Callable, Iterable
from itertools import chain, repeat
from typing import Any

import pytest

from tllm_spec.config.draft_shape import draft_len_table
from tllm_spec.config.speculative_config import UserProvidedDecodingConfig
from tllm_spec.executor.speculative.draft_length.adaptive import (
    CLOSED_WINDOWS,
    NO_LIMIT,
    AdaptiveController,
    DraftLenTable,
)
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
    batches = [(3, 1), (2, 2), (0, 3), (3, 3), (3, 3), (1, 0), (3, 2), (3, 3), (2, 3)]
    batches += [(3, 3)] * 6
    batches += [(7, 5), (4, 4), (2, 2), (1, 1), (0, 0), *[(0, 0)] * 5]
    controls = controller([1, 3, 7], 3)
    emas, switches = [], []
    for number, batch in enumerate(batches, start=1):
        if controls.observe(ObservedRound(2, list(batch))):
            switches.append((number, controls.tier_for(2)))
        emas.append(round(ema(controls), 6))
    first = [2, 2, 1.9, 2.12, 2.296, 1.9368, 2.04944, 2.239552, 2.291642, 2.433313, 2.546651]
    assert emas[:15] == [*first, 2.63732, 2.709856, 2.767885, 2.814308]
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


# Limits over the draft length: concurrency, schedule, and the gate that opens again.


def test_the_entry_of_the_largest_key_not_above_the_batch_size_holds() -> None:
    limits = DraftLenTable({8: 0, 2: 4, 4: 2})
    assert [limits.max_tier(size) for size in (1, 2, 3, 4, 7, 8, 99)] == [
        NO_LIMIT,
        4,
        4,
        2,
        2,
        0,
        0,
    ]
    assert limits.reachable == {0, 2, 4}


def test_windows_leave_contexts_a_fourth_of_the_rows_where_others_may_join() -> None:
    limits = DraftLenTable(max_num_tokens=16, max_batch_size=8)
    assert [limits.max_tier(size) for size in (1, 3, 4, 7, 8)] == [11, 3, 2, 0, 1]
    assert DraftLenTable(max_num_tokens=16).max_tier(4) == 3


def test_trees_that_are_as_wide_at_any_depth_have_all_drafts_or_none() -> None:
    tree = UserProvidedDecodingConfig(drafter=object(), max_draft_len=5, max_total_draft_tokens=10)
    limits = DraftLenTable(max_num_tokens=98, max_batch_size=8, tier_within=tree.shapes.tier_within)
    assert [limits.max_tier(size) for size in (6, 7, 8)] == [5, 0, 5]  # 7 may use 74 rows only


def test_no_drafts_above_max_concurrency() -> None:
    limits = DraftLenTable(draft_len_table(None, None, 4))
    assert [limits.max_tier(size) for size in (4, 5)] == [NO_LIMIT, 0]
    assert limits.reachable == {0}


def test_the_number_of_requests_is_compared_not_its_padding() -> None:
    slots = {"strategy": "ema", 1: {"candidate_steps": [3]}}
    controls = AdaptiveController.from_config(
        slots, graph_batch_sizes=[8], table=DraftLenTable({6: 0})
    )
    assert [controls.tier_for(size) for size in (5, 6)] == [3, 0]


def test_a_fixed_draft_length_is_shortened_by_limits_only() -> None:
    controls = AdaptiveController(DraftLenTable({0: 5, 1: 4, 9: 0}))
    assert not controls.observe(ObservedRound(4, [0] * 4, 4))
    assert [controls.tier_for(size) for size in (1, 8, 9)] == [4, 4, 0]
    assert AdaptiveController.fixed(5).tier_for(500) == 5


def test_a_ladder_without_a_length_within_the_limit_means_plain_decoding() -> None:
    limits = DraftLenTable({1: 4, 8: 2})
    ladder = {"candidate_steps": [3, 7]}
    for strategy in ("ema", "cost_model"):
        controls = AdaptiveController.from_config({"strategy": strategy, 1: ladder}, table=limits)
        assert [controls.tier_for(size) for size in (1, 8)] == [3, 0], strategy
    assert controls.tiers == (2, 3, 4, 7)


def rounds(gate: DraftLenTable, num_accepted: int, number: int) -> list[bool]:
    """Whether the gate is closed after each of so many rounds of 4 drafts, none while it is
    closed."""
    closed = []
    for _ in range(number):
        gate.observe([] if gate.is_closed else [num_accepted], 0 if gate.is_closed else 4)
        closed.append(gate.is_closed)
    return closed


def test_the_gate_closes_after_a_full_window_below_the_threshold() -> None:
    assert rounds(DraftLenTable(gate=(0.5, 3)), 1, 4) == [False, False, True, True]
    assert not any(rounds(DraftLenTable(gate=(0.5, 3)), 2, 50))  # at the threshold is not below it


def test_the_gate_weighs_every_draft_of_its_window_alike() -> None:
    gate = DraftLenTable(gate=(0.5, 2))
    gate.observe([4, 4, 4, 4, 4, 4], 24)
    gate.observe([0], 4)
    assert not gate.is_closed and gate.rate == pytest.approx(24 / 28)


def test_a_closed_gate_opens_for_one_window_in_a_hundred() -> None:
    gate = DraftLenTable(gate=(0.5, 3))
    closed = rounds(gate, 0, 3000)
    assert closed.count(False) == pytest.approx(0.01 * 3000, abs=4)
    while gate.is_closed:
        rounds(gate, 4, 1)
    assert not any(rounds(gate, 4, 500))


def test_a_gate_that_closes_or_opens_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    gate, lines = DraftLenTable(gate=(0.5, 2)), []
    with caplog.at_level("INFO", logger="tllm_spec"):
        for number in range(2 + 2 * CLOSED_WINDOWS):
            gate.observe([0, 1], 4)
            lines += [number] * len(caplog.records)
            caplog.clear()
            if number == 1:
                assert gate.is_closed
    assert lines == [1, 1 + 2 * CLOSED_WINDOWS] and not gate.is_closed


def test_the_line_has_the_rate_and_the_threshold(caplog: pytest.LogCaptureFixture) -> None:
    gate = DraftLenTable(gate=(0.5, 1))
    with caplog.at_level("INFO", logger="tllm_spec"):
        gate.observe([0, 1], 4)
    assert "closes" in caplog.text and "0.250" in caplog.text and "below 0.5" in caplog.text
