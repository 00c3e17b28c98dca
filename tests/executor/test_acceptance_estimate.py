"""Acceptance by position: what a round shows, what is inferred, how estimates age."""

import pytest

from tllm_spec.executor.speculative.draft_length import estimates as acceptance_estimate
from tllm_spec.executor.speculative.draft_length.estimates import AcceptanceEstimate


def estimate_of(num_positions: int, prior: float = 0.6) -> AcceptanceEstimate:
    return AcceptanceEstimate((0, num_positions), prior, window=256.0)


def test_before_anything_is_seen_every_position_has_the_prior() -> None:
    estimate = estimate_of(3, prior=0.5)
    assert estimate.rates == [0.5] * 3
    assert estimate.expected == [0, 0.5, 0.75, 0.875]


def test_a_round_shows_one_position_more_than_was_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_estimate, "PRIOR_TRIALS", 1e-9)
    monkeypatch.setattr(acceptance_estimate, "SHARED_TRIALS", 1e-9)
    estimate = estimate_of(3)
    estimate.observe_lengths(4, [0, 1, 1, 3], 3)
    assert estimate.rates == pytest.approx([3 / 4, 1 / 3, 0.999], abs=1e-3)
    assert estimate.expected == pytest.approx([0, 0.75, 1.0, 1.25], abs=2e-3)


def test_windows_longer_than_255_drafts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptance_estimate, "SHARED_TRIALS", 1e-9)
    estimate = estimate_of(300)
    estimate.observe_lengths(2, [280, 300], 300)
    assert estimate.rates[279:282] == pytest.approx([0.999, 1 / 2, 0.999], abs=1e-3)


def test_drafts_of_a_longer_round_than_the_ladder_count_as_far_as_it_goes() -> None:
    estimate = estimate_of(2)
    for _ in range(300):
        estimate.observe_lengths(1, [4], 4)
    assert min(estimate.rates) > 0.95


def test_positions_without_evidence_follow_the_others() -> None:
    estimate = estimate_of(3)
    for _ in range(500):
        estimate.observe_lengths(1, [1], 1)
    assert estimate.rates[2] > 0.95
    for _ in range(1000):
        estimate.observe_lengths(1, [0], 1)
    assert estimate.rates[2] < 0.1


def test_positions_without_evidence_follow_the_others_within_a_few_rounds() -> None:
    estimate = estimate_of(3)
    for _ in range(4):
        estimate.observe_lengths(8, [1] * 8, 1)
    assert min(estimate.rates) > 0.9


def test_the_prior_follows_what_was_seen_and_outlives_it() -> None:
    """After thousands of idle rounds a position that was never reached still expects little."""
    estimate = estimate_of(2)
    for _ in range(500):
        estimate.observe_lengths(1, [0], 1)
    for _ in range(5000):
        estimate.observe_lengths(1, [], 0)
    estimate.observe_lengths(1, [0], 1)
    assert estimate.rates[1] < 0.1


def test_positions_beyond_the_present_length_keep_a_quarter_of_the_window() -> None:
    """An accepted draft there then moves the estimate less than after plain decoding."""

    def moved_by_one_acceptance(idle_steps: int) -> float:
        estimate = estimate_of(2)
        for _ in range(500):
            estimate.observe_lengths(1, [1], 2)  # the second draft is always wrong
        for _ in range(5000):
            estimate.observe_lengths(1, [1] if idle_steps else [], idle_steps)
        before = estimate.rates[1]
        estimate.observe_lengths(1, [2], 2)
        return estimate.rates[1] - before

    assert 0 < moved_by_one_acceptance(1) < moved_by_one_acceptance(0) / 3


def test_a_position_that_was_seen_keeps_its_own_rate() -> None:
    estimate = estimate_of(2)
    for _ in range(500):
        estimate.observe_lengths(1, [1], 2)  # the second draft is always wrong
    assert estimate.rates[0] > 0.9 and estimate.rates[1] < 0.1


def test_rounds_without_drafts_keep_an_estimate_and_make_it_easy_to_change() -> None:
    def rate_after_one_acceptance(idle_rounds: int) -> tuple[float, float]:
        estimate = estimate_of(1)
        for _ in range(500):
            estimate.observe_lengths(1, [0], 1)
        for _ in range(idle_rounds):
            estimate.observe_lengths(1, [], 0)
        before = estimate.rates[0]
        estimate.observe_lengths(1, [1], 1)
        return before, estimate.rates[0] - before

    (recent, small), (old, large) = rate_after_one_acceptance(0), rate_after_one_acceptance(2000)
    assert old == pytest.approx(recent, abs=0.02) and large > 3 * small


def test_a_round_without_drafts_ages_an_estimate_as_eight_requests_do() -> None:
    def rate_after_idle_rounds_of(num_requests: int) -> float:
        estimate = estimate_of(1)
        for _ in range(500):
            estimate.observe_lengths(1, [0], 1)
        for _ in range(30):
            estimate.observe_lengths(num_requests, [], 0)
        estimate.observe_lengths(1, [1], 1)
        return estimate.rates[0]

    one, eight, many = map(rate_after_idle_rounds_of, (1, 8, 32))
    assert one == eight < many


def test_an_estimate_never_becomes_certain() -> None:
    for accepted, bound in ((0, acceptance_estimate.MIN_RATE), (1, acceptance_estimate.MAX_RATE)):
        estimate = estimate_of(1)
        for _ in range(20_000):
            estimate.observe_lengths(1, [accepted], 1)
        assert 0.001 <= estimate.rates[0] <= 0.999
        assert estimate.rates[0] == pytest.approx(bound, abs=2e-3)


def test_more_requests_fill_the_memory_in_fewer_rounds() -> None:
    def rate(batch_size: int, rounds: int) -> float:
        estimate = estimate_of(1)
        for _ in range(2000):
            estimate.observe_lengths(batch_size, [1] * batch_size, 1)
        for _ in range(rounds):
            estimate.observe_lengths(batch_size, [0] * batch_size, 1)
        return estimate.rates[0]

    assert rate(32, 8) < 0.5 < rate(1, 8)
