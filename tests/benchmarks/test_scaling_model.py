"""The cost model of several devices, against the rounds and sums that were measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import pytest

from benchmarks.harness.cost_model import H200
from benchmarks.harness.report import load
from benchmarks.harness.scaling_shapes import (
    DEEPSEEK_V3,
    LLAMA_8B,
    QWEN3_30B,
    QWEN3_235B,
    V3_STYLE,
    Shape,
)
from benchmarks.scaling_model import checked, checked_on_several

TOLERANCE = 0.10


def test_the_model_is_within_10_percent_of_every_measured_round() -> None:
    found = list(checked())
    wrong = [f"{each.what}, batch {each.batch}: {each.error:+.1%}" for each in found]
    assert not [
        text for each, text in zip(found, wrong, strict=True) if abs(each.error) > TOLERANCE
    ]
    for shape in (LLAMA_8B, QWEN3_30B, V3_STYLE):
        assert sum(each.what.startswith(shape.name) for each in found) >= 3


def test_the_model_is_within_15_percent_of_every_round_of_several_devices() -> None:
    """But for one of eight devices (docs/scaling.md)."""
    found = [each for each in checked_on_several() if each.devices > 1]
    wrong = [each for each in found if abs(each.error) > 0.15]
    assert [(each.devices, each.what, each.batch) for each in wrong] == [
        (8, "Llama 3.1 8B, bf16, EAGLE-3 K=3", 8)
    ]
    assert Counter((each.devices, each.device) for each in found) == {
        (2, "H100"): 18,
        (4, "H200"): 18,
        (8, "H200"): 12,
    }


@pytest.mark.parametrize(
    ("run", "devices", "tolerance"),
    [("several_devices", 2, 0.17), ("several_devices_ranks_4", 4, 0.22)],
)
def test_the_sum_that_the_model_takes_is_as_fast_as_the_faster_measured_one(
    run: str, devices: int, tolerance: float
) -> None:
    """With one set of constants for two and for four devices, up to 4 MiB."""
    rows = load(run)["sums"]["rows"]
    assert {row["ranks"] for row in rows} == {devices}
    has_two_shot = any("two_shot_us" in row for row in rows)
    model = H200 if has_two_shot else replace(H200, two_shot_seconds=inf, one_shot_hidden=0.0)
    for row in (row for row in rows if row["bytes"] <= 1 << 22):
        predicted = 1e6 * model.all_reduce_seconds(row["bytes"], devices)
        ways = ("nccl_us", "one_shot_us", "two_shot_us")
        measured = min(row[way] for way in ways if way in row)
        assert abs(predicted / measured - 1) < tolerance, row


def test_the_share_of_one_device_that_two_take_is_within_7_percent_of_the_measured() -> None:
    found = {(each.what, each.batch, each.devices): each for each in checked_on_several()}
    twos = [key for key in found if key[2] == 2 and (*key[:2], 1) in found]
    assert len(twos) == 12
    for what, batch, _ in twos:
        one, two = found[what, batch, 1], found[what, batch, 2]
        measured, predicted = two.measured / one.measured, two.predicted / one.predicted
        assert abs(predicted / measured - 1) < 0.07, (what, batch, measured, predicted)


@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN3_30B, V3_STYLE])
def test_two_devices_are_faster_than_one_and_slower_than_twice_as_fast(shape: Shape) -> None:
    one, two = (H200.round_seconds(shape, 8, 1, 1024, devices) for devices in (1, 2))
    assert one / 2 < two < one


def test_a_sum_over_two_hosts_costs_more_than_within_one() -> None:
    assert 0 == H200.all_reduce_seconds(1 << 14, 1) < H200.all_reduce_seconds(1 << 14, 8)
    assert H200.all_reduce_seconds(1 << 14, 8) < H200.all_reduce_seconds(1 << 14, 16)


def test_slices_that_cut_blocks_of_fp8_down_projections_have_16_bits() -> None:
    """1536 / 8 = 192 is no multiple of 128; 2048 / 16 is one."""
    cut = [QWEN3_235B.expert_bytes(slices) for slices in (1, 4, 8, 16)]
    assert cut == [1, 1, pytest.approx(4 / 3), pytest.approx(4 / 3)]
    wide = replace(QWEN3_235B, weight_bytes=2)
    assert {wide.expert_bytes(slices) for slices in (1, 8)} == {2}
    assert {DEEPSEEK_V3.expert_bytes(slices) for slices in (1, 8, 16)} == {1}
    uncut = replace(QWEN3_235B, expert_inner=2048)
    for devices, differs in ((4, False), (8, True), (16, True)):
        both = [H200.round_seconds(shape, 32, 1, 2048, devices) for shape in (uncut, QWEN3_235B)]
        assert (both[0] < both[1]) == differs
        added = QWEN3_235B.total_bytes(devices) - uncut.total_bytes(devices)
        assert added == pytest.approx(differs * 94 * 128 * 4096 * 1536)
    # With each expert on one device nothing is cut.
    both = [H200.round_seconds(shape, 32, 1, 2048, 8, 8) for shape in (uncut, QWEN3_235B)]
    assert both[0] == both[1]
