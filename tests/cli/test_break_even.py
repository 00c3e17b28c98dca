"""The throughput equation of chain drafts, and what it makes of measured times."""

import pytest

from tllm_spec.bench.break_even import expected_tokens, least_acceptance, speedup_row
from tllm_spec.outputs import SpeculativeStats

PAIRS = (0.3, 2), (0.5, 3), (0.7, 4), (0.85, 5)


def test_the_tokens_of_a_round_follow_the_closed_form() -> None:
    for acceptance, draft_len in PAIRS:
        tokens = (1 - acceptance ** (draft_len + 1)) / (1 - acceptance)
        assert expected_tokens(acceptance, draft_len) == pytest.approx(tokens)
    assert expected_tokens(0.6, 4) == pytest.approx(2.3056)


def test_drafts_that_are_always_accepted_never_accepted_or_absent() -> None:
    assert (expected_tokens(1, 5), expected_tokens(0, 5), expected_tokens(0.7, 0)) == (6, 1, 1)


def test_the_speedup_is_the_tokens_of_a_round_over_its_time_in_plain_rounds() -> None:
    row = speedup_row(0.5, 3, 1.5, 0.75, SpeculativeStats(10, 19, (10, 9), (5, 4)))
    assert row["predicted"] == pytest.approx(1.875 / 1.5)
    assert row["difference"] == pytest.approx(0.75 / 1.25 - 1)
    assert (row["drafted_share"], row["measured_tokens_per_round"]) == (1, pytest.approx(1.9))


def test_rounds_without_drafts_count_as_plain_ones() -> None:
    """A drafter that finds its drafts in the text has them in 4 of 10 rounds."""
    row = speedup_row(0.5, 3, 1.5, 0.75, SpeculativeStats(10, 14, (4, 4), (3, 1)))
    assert (row["drafted_share"], row["measured_tokens_per_round"]) == (0.4, 2)
    assert row["predicted"] == pytest.approx((6 + 4 * 1.875) / (6 + 4 * 1.5))
    never = speedup_row(0.5, 3, 1.5, 0.75, SpeculativeStats(10, 10, (), ()))
    assert (never["predicted"], never["measured_tokens_per_round"]) == (1, None)


@pytest.mark.parametrize("draft_len", [1, 3, 7])
def test_at_the_least_acceptance_the_speedup_is_one(draft_len: int) -> None:
    cost = 1 + draft_len * 0.1
    least = least_acceptance(draft_len, cost)
    assert least is not None and expected_tokens(least, draft_len) == pytest.approx(cost)
    assert 0 < least < 1


def test_there_is_no_least_acceptance_when_drafting_never_pays() -> None:
    assert least_acceptance(1, cost=3.0) is None
