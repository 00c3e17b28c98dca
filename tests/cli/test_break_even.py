"""The throughput equation of chain drafts."""

import pytest

from tllm_spec.bench.break_even import USUAL_PAIRS, BreakEven, expected_tokens


def test_the_tokens_of_a_round_are_the_sum_of_the_acceptance_probabilities() -> None:
    for acceptance, draft_len in USUAL_PAIRS:
        probabilities = sum(acceptance**position for position in range(draft_len + 1))
        assert expected_tokens(acceptance, draft_len) == pytest.approx(probabilities)
    assert expected_tokens(0.6, 4) == pytest.approx(2.3056)


def test_drafts_that_are_always_accepted_never_accepted_or_absent() -> None:
    assert (expected_tokens(1, 5), expected_tokens(0, 5), expected_tokens(0.7, 0)) == (6, 1, 1)


def test_without_costs_the_speedup_is_the_number_of_tokens_of_a_round() -> None:
    free = BreakEven(draft_time=0.0, target_time=1.0, plain_time=1.0)
    speedups = [free.speedup(*pair) for pair in USUAL_PAIRS]
    assert speedups == pytest.approx([1.39, 1.875, 2.7731, 4.1523], rel=1e-3)


def test_draft_and_verification_times_reduce_the_speedup() -> None:
    costly = BreakEven(draft_time=0.5, target_time=5.0, plain_time=4.0)
    assert costly.speedup(0.5, 3) == pytest.approx(1.875 * 4.0 / 6.5)


@pytest.mark.parametrize("draft_len", [1, 3, 7])
def test_at_the_least_acceptance_the_speedup_is_one(draft_len: int) -> None:
    model = BreakEven(draft_time=0.25, target_time=4.1, plain_time=4.0)
    least = model.least_acceptance(draft_len)
    assert least is not None and model.speedup(least, draft_len) == pytest.approx(1)
    assert 0 < least < 1


def test_there_is_no_least_acceptance_when_drafting_never_pays() -> None:
    assert BreakEven(draft_time=3.0, target_time=9.0, plain_time=4.0).least_acceptance(1) is None


@pytest.mark.parametrize(("acceptance", "draft_len"), [(-0.1, 1), (1.1, 1), (0.5, -1)])
def test_impossible_figures_are_refused(acceptance: float, draft_len: int) -> None:
    with pytest.raises(ValueError, match="acceptance"):
        expected_tokens(acceptance, draft_len)
