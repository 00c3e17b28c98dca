"""The cost model of several devices: it agrees with what was measured on one, and with its page."""

from pathlib import Path

import pytest

from benchmarks.scaling_model import (
    LLAMA_8B,
    SUBJECTS,
    all_reduce_seconds,
    hit_experts,
    measured,
    predicted_ms,
    round_seconds,
)

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_predictions_for_one_device_are_within_ten_percent_of_measured_rounds() -> None:
    found = [(predicted_ms(path, batch), ms) for path, batch, ms in measured()]
    assert len(found) >= 10
    for predicted, ms in found:
        assert predicted == pytest.approx(ms, rel=0.1)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_the_page_has_the_models_tables(subject: str) -> None:
    assert "\n".join(SUBJECTS[subject]()) in PAGE.read_text(encoding="utf-8")


def test_more_devices_read_less_and_sum_more() -> None:
    assert all_reduce_seconds(8192, 1) == 0
    assert all_reduce_seconds(8192, 8) < all_reduce_seconds(1 << 24, 8)
    assert all_reduce_seconds(8192, 8) < all_reduce_seconds(8192, 16)
    one, two = (round_seconds(LLAMA_8B, 1, 1, 1024, devices) for devices in (1, 2))
    assert one / 2 < two < one


def test_a_part_of_the_experts_reads_at_least_its_share_of_those_that_are_hit() -> None:
    whole = hit_experts(64, 4, 8, 1)
    assert 4 < whole <= 32
    assert whole / 4 < hit_experts(64, 4, 8, 4) <= 16
