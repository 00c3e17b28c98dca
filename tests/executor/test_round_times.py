"""Round times: between measured ones, and corrected by what the present contexts add."""

import pytest

from tests.executor.played_rounds import LADDER, LinearTimes
from tllm_spec.executor.speculative.draft_length.round_times import (
    ASSUMED_TIMES,
    CorrectedRoundTimes,
    MeasuredRoundTimes,
)


def corrected(*, has_contexts: bool = True) -> CorrectedRoundTimes:
    """10, 11, 12 and 13 ms."""
    return CorrectedRoundTimes(LinearTimes(1.0, has_contexts=has_contexts), LADDER)


def test_times_between_measured_ones_lie_on_a_line() -> None:
    times = MeasuredRoundTimes({2: {0: 1.0, 4: 3.0}, 4: {0: 2.0, 4: 8.0}})
    assert times.round_time(2, 2) == 2.0 and times.round_time(3, 0) == 1.5
    assert times.round_time(3, 2) == pytest.approx((2.0 + 5.0) / 2)
    assert times.round_time(1, 0) == 1.0  # before the first
    assert times.round_time(8, 0) == pytest.approx(4.0)  # on the line of the last two


@pytest.mark.parametrize(
    "tree", [[], {}, {"round_ms": {}}, {"round_ms": {"1": {}}}, {"round_ms": {"1": {"0": 0}}}, 3]
)
def test_round_times_that_cannot_be_meant_are_refused(tree: object) -> None:
    with pytest.raises(ValueError):
        MeasuredRoundTimes.from_json(tree)


def test_without_measurements_every_draft_takes_the_same_share() -> None:
    times = ASSUMED_TIMES
    one, two = (times.round_time(1, steps) - times.round_time(1, 0) for steps in (1, 2))
    assert two == pytest.approx(2 * one) and 0 < one < 0.2


def test_longer_contexts_add_the_same_time_to_all_lengths() -> None:
    times = corrected()
    for _ in range(500):
        times.observe(1, 1, 0.016)  # measured: 11 ms
    assert [times.row(1)[steps] for steps in LADDER] == pytest.approx(
        [0.015, 0.016, 0.017, 0.018], rel=0.01
    )
    assert times.row(2)[0] == pytest.approx(0.010)  # another batch size has its own


def test_shorter_contexts_never_make_a_time_fall_below_half() -> None:
    times = corrected()
    for _ in range(2000):
        times.observe(1, 0, 1e-6)
    assert min(times.row(1).values()) >= 0.005 - 1e-9


def test_one_round_that_took_a_second_changes_the_times_little() -> None:
    times = corrected()
    times.observe(1, 0, 1.0)
    assert times.row(1)[0] < 0.0103


def test_one_round_that_took_no_time_changes_the_times_little() -> None:
    times = corrected()
    times.observe(1, 0, 1e-9)
    assert times.row(1)[0] > 0.0097


def test_times_without_contexts_are_not_corrected() -> None:
    """A slower machine stretches all lengths alike, which decides nothing."""
    times = corrected(has_contexts=False)
    for _ in range(100):
        times.observe(1, 0, 0.030)
    assert times.row(1)[0] == pytest.approx(0.010)


def test_a_length_that_is_not_in_the_ladder_is_ignored() -> None:
    times = corrected()
    times.observe(1, 7, 1.0)
    assert times.row(1)[0] == pytest.approx(0.010)
    assert times.state() == {"1": pytest.approx({"0": 10, "1": 11, "2": 12, "3": 13})}
