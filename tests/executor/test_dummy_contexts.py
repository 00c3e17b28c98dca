"""Rounds that are timed with contexts before the first request: what they read, and that they leave
nothing."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.executor.draft_caches import one_model
from tests.executor.harness import Harness, output_of
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.config.draft_shape import DraftShapes, chain_of
from tllm_spec.executor.building.rounds import RoundTimer
from tllm_spec.executor.engine.rows import AttentionGroups, PagedGroup
from tllm_spec.executor.graphs.context_graphs import ContextLimits, DummyContexts
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, graph_keys

CPU = torch.device("cpu")
DUMMY = 8
LIMITS = ContextLimits(300, 10)
LADDER = {"adaptive": {"candidate_steps": [0, 1, 3]}}


@pytest.fixture
def harness(tiny: Path, tmp_path: Path, eager_graphs: None) -> Harness:
    head = write_tiny_eagle3(tmp_path / "head", num_captured=2)
    harness = Harness(tiny, max_seq_len=300, **one_model(tiny, head, "eagle3", **LADDER))
    with torch.inference_mode():
        keys = graph_keys((2, 4), lambda _: {0, 1, 3})
        harness.parts.runner.capture_graphs(keys, DUMMY, CPU, pads=True)
    return harness


@torch.inference_mode()
def test_each_round_reads_its_own_pages_at_the_same_lengths(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = harness.parts
    seen: list[tuple[list[int], list[int], set[int]]] = []

    def seconds(graphs: CudaGraphs, key: GraphKey, slots: list[int], renew: Any) -> float:
        for _ in range(3):
            renew()
            tables = parts.kv.groups[0].table.device_rows[: key.batch_size]
            seen.append((slots, parts.slots.kv_lens[:5].tolist(), set(tables[tables > 0].tolist())))
            graphs.replay(slots, key.shape, key.sampled)
        return 2.0

    monkeypatch.setattr(CudaGraphs, "seconds", seconds)
    assert parts.runner.seconds_with_contexts(GraphKey(4, chain_of(3), False), LIMITS) == 2.0
    assert seen == [([0, 1, 2, 3], [300] * 4 + [0], set(range(1, 1 + 4 * 10)))] * 3
    assert not parts.slots.kv_lens[:DUMMY].any() and not parts.kv.groups[0].table.device_rows.any()


@torch.inference_mode()
def test_texts_after_timing_are_those_of_an_engine_that_was_not_timed(
    harness: Harness, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(graphs: CudaGraphs, key: GraphKey, slots: list[int], renew: Any) -> float:
        renew()
        graphs.replay(slots, key.shape, key.sampled)
        return 1.0

    monkeypatch.setattr(CudaGraphs, "seconds", seconds)
    for key in graph_keys((2, 4), lambda _: {0, 1, 3}):
        assert harness.parts.runner.seconds_with_contexts(key, LIMITS) == 1.0
    plain = Harness(tiny, max_seq_len=300)
    requests = [
        each.submit([5, 9, 2, i], max_tokens=40) for each in (harness, plain) for i in range(4)
    ]
    for each in (harness, plain):
        each.run()
    assert list(map(output_of, requests[:4])) == list(map(output_of, requests[4:]))


def test_contexts_are_as_long_as_there_is_place_for_them(harness: Harness) -> None:
    parts = harness.parts
    slots, rows = parts.slots, parts.runner.engine.rows

    def length(batch_size: int, num_pages: int) -> int:
        backend = Mock(pool=Mock(num_pages=num_pages))
        attention = AttentionGroups([PagedGroup(backend, rows)])
        return DummyContexts(slots, attention, LIMITS).length(batch_size)

    assert length(1, 1000) == 300
    assert length(4, 1 + 4 * 9) == 9 * 32 - 10
    assert length(4, 1 + 4 * 8) == 0  # shorter than what can be told from nothing
    assert length(DUMMY + 1, 1000) == 0  # more requests than slots


@torch.inference_mode()
def test_start_up_times_rounds_with_contexts_where_there_is_room_for_them(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, controller = harness.parts.runner, harness.parts.controller

    def seconds(graphs: CudaGraphs, key: GraphKey, slots: Any = None, renew: Any = None) -> float:
        return 1.0 + 0.1 * key.shape.depth + (0.2 if slots is not None else 0.0)

    monkeypatch.setattr(CudaGraphs, "seconds", seconds)
    for limits, added in ((LIMITS, 0.2), (ContextLimits(200, 10), 0.0)):  # the second: too short
        times = RoundTimer(runner, DraftShapes.chains(3), DUMMY, CPU, limits).measure(
            controller, (2, 4)
        )
        found = [times.round_time(3, steps) for steps in (0, 1, 3)]
        assert found == pytest.approx([1.0 + added, 1.1 + added, 1.3 + added])
        assert times.has_contexts
