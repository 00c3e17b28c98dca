"""A draft network that catches up in a CUDA graph writes what it writes without one."""

from pathlib import Path
from typing import Any

import pytest

from tests.executor.draft_caches import HOT, one_model, proposer_of
from tests.executor.graph_rounds import capture_rounds
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tllm_spec.config.draft_shape import NO_DRAFTS
from tllm_spec.executor.graphs.slot_graphs import Captured, SlotGraphs, graph_keys
from tllm_spec.executor.request import LlmRequest

MODES = ["draft_target", "eagle3", "eagle3_two_model"]
ON_CPU = [*MODES, "eagle3_onnxruntime"]
PAUSES = {"draft_len_schedule": {1: 3, 5: 0}}


def captured(harness: Harness, sizes: tuple[int, ...], *, pads: bool = True) -> Harness:
    capture_rounds(harness, graph_keys(sizes, lambda _: {0, 3}), pads=pads)
    return harness


def catch_ups_of(harness: Harness) -> SlotGraphs[None]:
    backlog = proposer_of(harness)._backlog
    assert backlog is not None and backlog._graphs is not None
    return backlog._graphs


def watch_catch_ups(harness: Harness) -> list[tuple[int, bool]]:
    """How many requests catch up at a time, and whether a graph does it."""
    graphs = catch_ups_of(harness)
    replay, seen = graphs.run, list[tuple[int, bool]]()

    def watched(slots: list[int], draft_len: int, sampled: bool) -> Captured[None] | None:
        found = replay(slots, draft_len, sampled)
        seen.append((len(slots), found is not None))
        return found

    graphs.run = watched  # type: ignore[method-assign] # a spy on this one object
    return seen


def sizes_of(mode: str) -> set[int]:
    """A model reads when 4 are left and drafts are wanted again; a head while there are 7, too."""
    return {4} if mode == "draft_target" else {4, 7}


def run_in_step(harnesses: list[Harness], sampled: bool) -> list[list[LlmRequest]]:
    """From 7 requests to 3 and back to 6 and down to 1, so that rounds are plain and draft in
    turn."""
    requests: list[list[LlmRequest]] = [[] for _ in harnesses]
    for number in range(150):
        joining = {0: (22, 25, 28, 31, 70, 75, 120), 45: (20, 40, 40)}.get(number, ())
        for harness, own in zip(harnesses, requests, strict=True):
            for i, max_tokens in enumerate(joining):
                temperature = HOT if sampled and i % 2 else None
                own.append(
                    harness.submit([i + number, 5, i], max_tokens, temperature=temperature, seed=i)
                )
            harness.round()
    assert all(request.is_finished for own in requests for request in own)
    return requests


def assert_alike(ours: list[LlmRequest], theirs: list[LlmRequest]) -> None:
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.counters.by_drafted == other.counters.by_drafted
        assert mine.counters.by_accepted == other.counters.by_accepted
    assert sum(sum(request.counters.by_drafted[1:]) for request in ours) > 20


@pytest.mark.thinned(4)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", ON_CPU)
def test_a_captured_catch_up_writes_what_an_eager_one_writes(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str, sampled: bool
) -> None:
    speculation = one_model(tiny_draft, head, mode, **PAUSES)
    harness, eager = captured(Harness(tiny, **speculation), (1, 4, 8)), Harness(tiny, **speculation)
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled))
    assert {size for size, _ in seen} >= sizes_of(mode) and all(in_graph for _, in_graph in seen)
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", ON_CPU)
def test_no_catch_up_has_more_rows_than_a_round_may_have(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str
) -> None:
    speculation = one_model(tiny_draft, head, mode, **PAUSES)
    narrow: dict[str, Any] = speculation | {"max_num_tokens": 40}
    harness, eager = captured(Harness(tiny, **narrow), (1, 2, 8)), Harness(tiny, **speculation)
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled=False))
    odd = set() if mode == "draft_target" else {(1, True)}
    assert set(seen) == odd | {(2, True)}
    assert {size for size, _ in catch_ups_of(harness).tiers[NO_DRAFTS].graphs} == {1, 2}


def test_a_catch_up_that_fits_no_graph_runs_without(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None
) -> None:
    speculation = one_model(tiny_draft, head, "eagle3", **PAUSES)
    harness, eager = (
        captured(Harness(tiny, **speculation), (4, 8), pads=False),
        Harness(tiny, **speculation),
    )
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled=False))
    assert {in_graph for _, in_graph in seen} == {True, False}
    assert all((size in (4, 8)) == in_graph for size, in_graph in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_a_replayed_catch_up_is_the_eager_one(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, sampled: bool
) -> None:
    speculation = one_model(tiny_draft, head, mode, **PAUSES)
    harness, eager = (
        Harness(tiny, device="cuda", cuda_graph_config=graphs, **speculation)
        for graphs in ({"batch_sizes": [1, 4, 8]}, None)
    )
    seen = watch_catch_ups(harness)
    assert_alike(*run_in_step([harness, eager], sampled))
    assert {size for size, _ in seen} >= sizes_of(mode) and all(in_graph for _, in_graph in seen)
    assert all_pages_are_back(harness.executor)
