"""Limits over the draft length: concurrency, schedule, and the gate that opens again."""

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
