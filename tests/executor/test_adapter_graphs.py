"""A round with adapters replays the graphs with them, any other round those without."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapters.draft_adapters import RANK, accepted, harness_of, run, write_draft_adapters
from tests.adapters.tiny_adapters import NAMES, with_adapters, write_adapters
from tests.executor.conftest import EagerGraph
from tests.executor.graph_rounds import CPU, DUMMY, capture_rounds, graphs_of, replays_of
from tests.executor.harness import Harness, output_of
from tests.executor.row_rounds import PROMPT
from tests.executor.test_context_graphs import PlainPrefill
from tests.lossless.engines import tiny_engine
from tllm_spec.attention.flashinfer import FlashInferAttention
from tllm_spec.executor.engine.rows import AttentionGroups, PagedGroup
from tllm_spec.executor.graphs.context_graphs import capture_contexts
from tllm_spec.executor.graphs.slot_graphs import Captured, GraphPool, graph_keys

DRAFT_LEN = 3
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("plain", {}),
    "whole with drafts": ("eagle3", {}),
    "whole trees": ("eagle3_tree", {}),
    "forward and tail": ("eagle3_two_model", {}),
    "after a draft model": ("draft_target", {}),
    "shared rows": ("eagle3", {"verify_budget": 2}),
}


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"), tiny)


@pytest.fixture
def own_graphs(monkeypatch: pytest.MonkeyPatch) -> list[Harness]:
    """Captures of the harness that is put here, without a CUDA device: as a graph does, a replay
    launches what was launched at the capture, whatever the flags are then."""
    captured: list[Harness] = []

    def capture(pool: GraphPool, work: Callable[[], Any]) -> Captured[Any]:
        [harness] = captured
        assert harness.parts.adapters is not None
        adapters = harness.parts.adapters
        rows = adapters.tables.rows
        was_active = rows.is_active

        def again() -> Any:
            now = rows.is_active
            adapters.use(was_active)
            try:
                return work()
            finally:
                adapters.use(now)

        result = work()
        stand_in: Any = EagerGraph(again, result)
        return Captured(stand_in, result)

    monkeypatch.setattr(GraphPool, "capture", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    return captured


def outputs(harness: Harness, names: tuple[str | None, ...]) -> list[list[int]]:
    requests = [
        harness.submit([*PROMPT, i], 16, seed=i, adapter=name, temperature=0.5 * (i % 2))
        for i, name in enumerate(names)
    ]
    harness.run()
    return [*map(output_of, requests)]


@pytest.mark.thinned(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_round_with_adapters_has_graphs_of_its_own(
    tiny: Path, drafts: tuple[Path, Path], adapters: Path, way: str, own_graphs: list[Harness]
) -> None:
    mode, speculation = WAYS[way]
    plain = with_adapters(tiny, adapters, max_batch_size=1)
    mixed, bare = (None, "a", "b", "a", "c"), (None,) * 3
    expected = [outputs(plain, names) for names in (mixed, bare)]
    options = tiny_engine(mode, drafts, DRAFT_LEN, **speculation)
    harness = with_adapters(tiny, adapters, **options)
    own_graphs.append(harness)
    shapes = harness.parts.slots.shapes
    tiers = {0, shapes.tier_of(shapes.longest)}
    keys = graph_keys((4, 8), lambda _: tiers, shapes.of)
    capture_rounds(harness, keys)
    graphs = harness.parts.runner.graphs
    assert graphs is not None
    own = graphs.forwards if way == "forward and tail" else graphs.whole
    assert {key.adapted for key in own.captured} == {False, True}
    assert not any(key.adapted for key in graphs.tails.captured)
    found, kinds = [], []
    for names in (mixed, bare):
        before = replays_of(own)
        found.append(outputs(harness, names))
        now = replays_of(own)
        kinds.append({key.adapted for key in now if now[key] > before.get(key, 0)})
    assert found == expected
    assert kinds == [{False, True}, {False}] or kinds == [{True}, {False}]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_model"])
def test_graphs_with_adapters_hold_those_of_the_draft_head(
    mode: str, tmp_path: Path, own_graphs: list[Harness]
) -> None:
    folders, schedule = write_draft_adapters(tmp_path), {"draft_len_schedule": {1: 4, 5: 0}}
    eager = run(harness_of(folders, mode, "head", RANK, **schedule))
    harness = harness_of(folders, mode, "head", RANK, **schedule)
    own_graphs.append(harness)
    shapes = harness.parts.slots.shapes
    capture_rounds(harness, graph_keys((4, 8), lambda _: {0, 4}, shapes.of))
    found = run(harness)
    assert [*map(output_of, found)] == [*map(output_of, eager)]
    assert accepted(found) == accepted(eager)
    graphs: Any = harness.parts.drafter
    for own in (graphs_of(harness), graphs._backlog._graphs):
        assert any(key.adapted for key in replays_of(own))


def test_prompts_with_adapters_have_graphs_of_their_own(
    tiny: Path, adapters: Path, own_graphs: list[Harness]
) -> None:
    plain = with_adapters(tiny, adapters, max_batch_size=1)
    harness = with_adapters(tiny, adapters)
    own_graphs.append(harness)
    runner = harness.parts.runner
    old = runner.engine.attention.groups[0].backend
    flashinfer = FlashInferAttention(old.geometry, old.pool, PlainPrefill(old.geometry))
    runner.engine.attention = AttentionGroups([PagedGroup(flashinfer, runner.engine.rows)])
    with torch.inference_mode():
        runner.context_graphs = capture_contexts(runner.engine, (8, 40), DUMMY, GraphPool(CPU))
    graphs: Any = runner.context_graphs
    run, names = partial(outputs, harness), (*NAMES, None)
    assert run(names) == outputs(plain, names)
    before = {key: own.graph.replays for key, own in graphs._graphs.items()}
    assert sum(number for (_, adapted), number in before.items() if adapted) > 0
    assert run((None, None)) == outputs(plain, (None, None))
    after = {key: own.graph.replays for key, own in graphs._graphs.items()}
    assert {adapted for _, adapted in after if after[_, adapted] > before[_, adapted]} == {False}
