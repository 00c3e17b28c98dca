"""The cost model of several devices, against the rounds that were measured on one."""

from __future__ import annotations

import pytest

from benchmarks.harness.scaling_shapes import LLAMA_8B, QWEN3_30B, V3_STYLE, Shape
from benchmarks.scaling_model import all_reduce_seconds, checked, round_seconds

TOLERANCE = 0.10


def test_the_model_is_within_10_percent_of_every_measured_round() -> None:
    found = list(checked())
    wrong = [f"{each.what}, batch {each.batch}: {each.error:+.1%}" for each in found]
    assert not [
        text for each, text in zip(found, wrong, strict=True) if abs(each.error) > TOLERANCE
    ]
    for shape in (LLAMA_8B, QWEN3_30B, V3_STYLE):
        assert sum(each.what.startswith(shape.name) for each in found) >= 3


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_30B, V3_STYLE])
def test_two_devices_are_faster_than_one_and_slower_than_twice_as_fast(shape: Shape) -> None:
    one, two = (round_seconds(shape, 8, 1, 1024, devices) for devices in (1, 2))
    assert one / 2 < two < one


def test_a_sum_over_two_hosts_costs_more_than_within_one() -> None:
    assert 0 == all_reduce_seconds(1 << 14, 1) < all_reduce_seconds(1 << 14, 8)
    assert all_reduce_seconds(1 << 14, 8) < all_reduce_seconds(1 << 14, 16)
