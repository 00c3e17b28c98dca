"""Draft lengths at start-up: which rounds are timed and captured, and what limits leave."""

from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.conftest import Clock
from tests.executor.graph_rounds import keys_of_build
from tests.executor.harness import Harness, output_of
from tests.lossless.engines import tiny_engine
from tllm_spec.config.draft_shape import DraftShape, DraftShapes, chain_of
from tllm_spec.config.speculative_config import NGramDecodingConfig
from tllm_spec.executor.building.rounds import without_outliers
from tllm_spec.executor.speculative.draft_length.adaptive import controller_for
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet

LADDER = {"candidate_steps": [0, 1, 4]}


@pytest.mark.parametrize(
    "mode", ["draft_target_one_model", "draft_target", "eagle3_two_model", "ngram"]
)
def test_start_up_times_every_length_of_the_ladder_and_charges_separate_drafters(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    timed: list[tuple[int, int]] = []

    def seconds(_: Any, key: Any, *__: Any) -> float:
        timed.append((key.batch_size, key.shape.depth))
        return 1.0 + 0.01 * key.shape.depth

    monkeypatch.setattr("tllm_spec.executor.rounds.round_runner.RoundRunner.seconds", seconds)
    monkeypatch.setattr(
        "tllm_spec.executor.speculative.drafting.model_drafter.ModelDrafter.seconds_before",
        lambda _, key, *__: 0.5 * key.shape.depth,
    )
    harness = Harness(tiny, **tiny_engine(mode, drafts, 4, adaptive=LADDER))
    assert timed == [(size, steps) for size in (1, 2, 4, 8) for steps in (0, 1, 4, 4, 1, 0)]
    controller = harness.parts.controller
    controller.observe(ObservedRound(1, [], 0))
    charged = 0.5 if mode == "draft_target" else 0.0
    row = controller.state()["round_ms"]["1"]
    assert row["4"] - row["0"] == pytest.approx(1e3 * 4 * (0.01 + charged))


def test_a_drifting_clock_favours_no_length(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    """Each round takes 1 ms more than the one before. The order of timing is mirrored."""
    calls = count()

    def seconds(_: Any, key: Any, *__: Any) -> float:
        return 1.0 + 0.01 * key.shape.depth + 0.001 * next(calls)

    monkeypatch.setattr("tllm_spec.executor.rounds.round_runner.RoundRunner.seconds", seconds)
    config = {"decoding_type": "NGram", "max_draft_len": 4, "adaptive": LADDER}
    controller = Harness(tiny, speculative_config=config).parts.controller
    controller.observe(ObservedRound(1, [], 0))
    row = controller.state()["round_ms"]["1"]
    assert [row[steps] - row["0"] for steps in ("1", "4")] == pytest.approx([10, 40])


def test_times_without_graphs_have_no_contexts_and_are_not_corrected(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    monkeypatch.setattr(
        "tllm_spec.executor.rounds.round_runner.RoundRunner.seconds", lambda _, key, *__: 1.0
    )
    config = {"decoding_type": "NGram", "max_draft_len": 4, "adaptive": LADDER}
    controller = Harness(tiny, speculative_config=config).parts.controller
    controller.observe(ObservedRound(1, [], 0, seconds=3.0))
    assert controller.state()["round_ms"]["1"]["0"] == pytest.approx(1000)


@pytest.mark.parametrize("mode", ["draft_target", "eagle3_two_model"])
def test_without_graphs_a_separate_drafter_is_timed_with_dummy_requests(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    """Each forward of its network takes 10 ms. The dummy requests leave nothing behind."""
    forward = DraftNet.forward

    def slow(*args: Any, **keywords: Any) -> Any:
        clock.now += 0.01
        return forward(*args, **keywords)

    monkeypatch.setattr(DraftNet, "forward", slow)
    monkeypatch.setattr("tllm_spec.executor.building.rounds.EAGER_SIZES", (1,))
    harness = Harness(tiny, **tiny_engine(mode, drafts, 4, adaptive=LADDER))
    harness.parts.controller.observe(ObservedRound(1, [], 0))
    row = harness.parts.controller.state()["round_ms"]["1"]
    assert [row[steps] - row["0"] for steps in ("1", "4")] == pytest.approx([10, 40])
    monkeypatch.setattr(DraftNet, "forward", forward)
    request, plain = harness.submit([3, 1, 4], 20, seed=5), Harness(tiny)
    reference = plain.submit([3, 1, 4], 20, seed=5)
    harness.run()
    plain.run()
    assert output_of(request) == output_of(reference)


def test_drafts_are_not_free_next_to_batches_that_have_none(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """Batches of 5 are on a line between 4 and 8, and rounds of 8 never have drafts."""
    monkeypatch.setattr(
        "tllm_spec.executor.rounds.round_runner.RoundRunner.seconds",
        lambda _, key, *__: key.batch_size * (1.0 + key.shape.depth),
    )
    config = {
        "decoding_type": "NGram",
        "max_draft_len": 4,
        "adaptive": LADDER,
        "max_concurrency": 5,
    }
    harness = Harness(tiny, speculative_config=config)
    controller = harness.parts.controller
    controller.observe(ObservedRound(5, [], 0))
    row = controller.state()["round_ms"]["5"]
    assert row["4"] == pytest.approx(5 * row["0"]) and controller.tier_for(6) == 0


def test_start_up_times_rounds_on_as_many_threads_as_they_will_run_on(
    monkeypatch: pytest.MonkeyPatch, tiny: Path
) -> None:
    """A small model runs on one thread; the caller's thread has two, before and after."""
    seen: set[int] = set()

    def seconds(_: Any, key: Any, *__: Any) -> float:
        seen.add(torch.get_num_threads())
        return 1.0 + 0.01 * key.shape.depth

    monkeypatch.setattr("tllm_spec.executor.rounds.round_runner.RoundRunner.seconds", seconds)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        config = {"decoding_type": "NGram", "max_draft_len": 4, "adaptive": LADDER}
        harness = Harness(tiny, speculative_config=config)
        assert seen == {1} == {harness.parts.cpu_threads} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_without_adaptive_nothing_is_timed(monkeypatch: pytest.MonkeyPatch, tiny: Path) -> None:
    monkeypatch.setattr("tllm_spec.executor.building.rounds.RoundTimer", None)
    for own in ({}, {"adaptive": "conservative"}):
        config = {"decoding_type": "NGram", "max_draft_len": 7, **own}
        assert Harness(tiny, speculative_config=config).parts.controller.tier_for(1) in (3, 7)


def test_windows_of_a_full_batch_fit_one_forward() -> None:
    config = NGramDecodingConfig(max_draft_len=4)
    controller = controller_for(config, max_num_tokens=12)
    assert [controller.tier_for(size) for size in (1, 2, 3, 4, 5, 6, 12, 13)] == [
        4,
        4,
        3,
        2,
        1,
        1,
        0,
        0,
    ]
    assert controller.tiers_at(4) == {2}
    adaptive = controller_for(
        NGramDecodingConfig(max_draft_len=4, adaptive=LADDER), max_num_tokens=12
    )
    assert [adaptive.tiers_at(size) for size in (2, 3, 13)] == [{0, 1, 4}, {0, 1}, {0}]
    scheduled = NGramDecodingConfig(max_draft_len=4, draft_len_schedule={1: 4, 3: 2})
    limited = controller_for(scheduled, max_num_tokens=12)
    assert [limited.tier_for(size) for size in (2, 3, 5)] == [4, 2, 1]


def test_graphs_of_an_adaptive_draft_length_end_where_a_limit_begins(
    tiny: Path, drafts: tuple[Path, Path]
) -> None:
    """At 5 requests, or where the windows of longer drafts fill a forward. Every length at a size
    is timed."""
    ladder = {"adaptive": {"candidate_steps": [1, 3]}}

    def pairs(options: dict[str, Any], **more: Any) -> set[tuple[int, int]]:
        keys = keys_of_build(tiny, **tiny_engine("eagle3", drafts, 3, **options), **more)
        return {(key.batch_size, key.shape.depth) for key in keys}

    short = {(size, steps) for size in (1, 2, 4, 5) for steps in (1, 3)}
    plain = {(size, 0) for size in (1, 2, 4, 8)}  # where no request wants drafts
    assert pairs(ladder | {"max_concurrency": 5}) == short | plain | {(5, 0)}
    small = {
        (size, steps) for size in (1, 2, 3) for steps in (1, 3)
    }  # of 12 rows: 4 are the contexts'
    assert pairs(ladder, max_num_tokens=16) == small | plain | {(3, 0), (4, 1), (8, 1)}


def test_times_without_graphs_are_taken_without_outliers(
    monkeypatch: pytest.MonkeyPatch, tiny: Path, drafts: tuple[Path, Path]
) -> None:
    times = {0: 1.0, 1: 9.0, 4: 1.5}
    monkeypatch.setattr(
        "tllm_spec.executor.rounds.round_runner.RoundRunner.seconds",
        lambda _, key, *__: times[key.shape.depth],
    )
    harness = Harness(tiny, **tiny_engine("eagle3", drafts, 4, adaptive=LADDER))
    controls = harness.parts.controller
    controls.tier_for(1)
    assert controls.state()["round_ms"]["1"] == pytest.approx({"0": 1000, "1": 1500, "4": 1500})


def test_a_time_above_that_of_more_drafts_is_replaced_by_it() -> None:
    row = {0: 9.0, 1: 19.0, 3: 12.0, 5: 14.0}
    found = without_outliers(row, DraftShapes.chains(5))
    assert found == {0: 9.0, 1: 12.0, 3: 12.0, 5: 14.0}


def test_a_shallow_tree_says_nothing_about_the_time_of_a_longer_chain() -> None:
    trees = [DraftShape(2, 6, 3), DraftShape(5, 12, 3)]
    shapes = DraftShapes(list(map(chain_of, range(6))), trees, trees[1])
    row = {2: 12.0, 5: 15.0, 6: 11.0, 7: 14.0}
    assert without_outliers(row, shapes) == {2: 11.0, 5: 14.0, 6: 11.0, 7: 14.0}
