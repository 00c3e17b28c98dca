"""What is captured and set aside at start-up for drafting before the target's forward, and its
measured time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import eagle3
from tests.executor.draft_graphs import (
    CPU,
    DUMMY,
    MODES,
    captures_without_a_device,
    two_model,
    with_graphs,
)
from tests.executor.graph_rounds import KeyRecorder
from tests.executor.harness import Harness
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.config import LlmArgs
from tllm_spec.draft_shape import DraftShape, DraftShapes, chain_of
from tllm_spec.executor.building.draft_lens import RoundTimer
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.rounds import build_controller
from tllm_spec.executor.engine.memory_plan import BYTES_A_GRAPH
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.dummy_contexts import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import GraphKey, GraphTable, SlotGraphs
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.graph_drafter import GraphDrafter
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft
from tllm_spec.executor.speculative.modes import Speculation


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory, tiny_draft: Path) -> tuple[Path, Path]:
    return tiny_draft, write_tiny_eagle3(tmp_path_factory.mktemp("head"), num_captured=2)


@pytest.fixture
def depth(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return captures_without_a_device(monkeypatch)


def build_keys(
    model: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[GraphKey], list[GraphKey]]:
    """What the composition root would have captured on a CUDA device: the target's, then the
    drafts'."""
    drafter = Harness(model, **options).parts.drafter
    assert isinstance(drafter, GraphDrafter)
    plan = BuildPlan(
        LlmArgs.from_kwargs(model, **{"max_batch_size": 8, "max_seq_len": 256} | options)
    )
    plan.device = torch.device("cuda")
    recorder, seen = KeyRecorder(), list[GraphKey]()
    monkeypatch.setattr(drafter, "capture_drafting", lambda rounds, keys: seen.extend(keys))
    runner: Any = recorder
    build_controller(plan, runner, Speculation(drafter, graph_drafter=drafter), [])
    return recorder.keys, seen


def test_drafting_graphs_cover_the_draft_lengths_that_may_be_asked_for(
    tiny: Path, drafts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = {"draft_len_schedule": {1: 3, 6: 1}}
    rounds, drafting = build_keys(tiny, monkeypatch, **two_model(drafts, "draft_target", **cuts))
    lengths = {(key.batch_size, key.draft_len) for key in drafting}
    assert lengths == {(1, 3), (2, 3), (4, 3), (5, 3), (8, 1)} and set(drafting) < set(rounds)
    assert {key.sampled for key in drafting} == {False, True}
    ladder = {"adaptive": {"candidate_steps": [0, 1, 3]}}
    monkeypatch.setattr(RoundTimer, "measure", lambda *_: None)
    _, drafting = build_keys(tiny, monkeypatch, **two_model(drafts, "draft_target", **ladder))
    assert {key.draft_len for key in drafting} == {1, 3}
    rounds, drafting = build_keys(
        tiny, monkeypatch, max_num_tokens=20, **two_model(drafts, "eagle3", **ladder)
    )
    assert drafting == rounds and {key.draft_len for key in drafting} == {0, 1, 3}
    rejecting = two_model(drafts, "draft_target", use_rejection_sampling=True)
    assert build_keys(tiny, monkeypatch, **rejecting) == ([], [])
    assert build_keys(tiny, monkeypatch, cuda_graph_config=None, **two_model(drafts, "eagle3")) == (
        [],
        [],
    )


def test_drafts_are_captured_into_the_memory_of_the_rounds(depth: list[int]) -> None:
    rounds = SlotGraphs(lambda *_: None, DUMMY, CPU, pads=False)
    rounds.capture([GraphKey(1, chain_of(0), False)])
    drafting = rounds.for_same_slots(lambda *_: None)
    assert drafting._pool is rounds._pool
    drafting.capture([GraphKey(2, chain_of(3), False)])
    assert drafting.run([1, 2], chain_of(3), False) and not drafting.run(
        [1], chain_of(3), False
    )  # no padding here either
    assert GraphKey(2, chain_of(3), False) not in rounds and not rounds.run(
        [1, 2], chain_of(3), False
    )


@torch.inference_mode()
@pytest.mark.parametrize("mode", MODES)
def test_drafts_are_timed_with_graphs_and_without(
    tiny: Path,
    drafts: tuple[Path, Path],
    depth: list[int],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    ladder = {"adaptive": {"candidate_steps": [0, 1, 3]}}
    watched = with_graphs(monkeypatch, tiny, (1, 4), {1, 3}, **two_model(drafts, mode, **ladder))
    runner, controller = watched.harness.parts.runner, watched.harness.parts.controller
    rounds: list[GraphKey] = []
    replay = CudaGraphs.replay

    def seen(graphs: CudaGraphs, slots: list[int], shape: DraftShape, sampled: bool) -> Any:
        assert slots == [DUMMY] * len(slots)
        rounds.append(GraphKey(len(slots), shape, sampled))
        return replay(graphs, slots, shape, sampled)

    def seconds(graphs: GraphTable[Any], key: GraphKey) -> float:
        if graphs is not watched.drafter.graphs:
            return 1.0
        assert mode == "draft_target" or rounds[-1] == key  # the drafts read what that round left
        return 0.01 * (bool(rounds) + key.draft_len)

    monkeypatch.setattr(CudaGraphs, "replay", seen)
    for kind in (CudaGraphs, SlotGraphs):
        monkeypatch.setattr(kind, "seconds", seconds)
    timer = RoundTimer(
        runner, DraftShapes.chains(3), watched.drafter, DUMMY, CPU, ContextLimits(10, 10)
    )
    times = timer.measure(controller, (1, 4))
    catch_up = mode == "eagle3"  # a head reads what was emitted even if it is to draft nothing
    expected = [1 + 0.01 * (catch_up + steps) for steps in (0, 1, 3)]
    assert [times.round_time(4, steps) for steps in (0, 1, 3)] == pytest.approx(expected)
    watched.drafter.graphs = None
    eager = "tllm_spec.executor.speculative.drafting.graph_drafter.eager_seconds"
    monkeypatch.setattr(eager, lambda draft: 0.5 + 0 * draft()[0])
    times = timer.measure(controller, (1, 4))
    assert [times.round_time(4, steps) for steps in (0, 1, 3)] == pytest.approx([1.5, 1.5, 1.5])


@pytest.mark.parametrize(
    ("mode", "lengths", "drafts_of"),
    [("draft_target", (0, 3), (3,)), ("eagle3", (0, 3), (0, 3)), ("one_model", (0, 3), ())],
)
def test_the_memory_plan_counts_the_captured_graphs_and_their_buffers(
    tiny: Path,
    drafts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    lengths: tuple[int, ...],
    drafts_of: tuple[int, ...],
) -> None:
    options = eagle3(drafts[1]) if mode == "one_model" else two_model(drafts, mode)
    options |= {"max_batch_size": 8, "cuda_graph_config": {"batch_sizes": [2, 8]}}
    plan = BuildPlan(LlmArgs.from_kwargs(tiny, max_seq_len=256, **options))
    assert plan.draft_plan is not None
    net: Any = SimpleNamespace(config=plan.config)
    draft = LoadedDraft(plan.draft_plan, net, None)
    workspaces = 2 * plan.attention.workspace_bytes(plan.config.attention_geometry(plan.mapping))
    # Greedy and sampled, whole and after the forward, and the forward alone.
    num_graphs = 2 * (5 * len(lengths) + 2 * len(drafts_of))
    left_bytes = 8 * (1 + 3) * (plan.config.hidden_size + 1 + 64 // 32) * 4
    if plan.draft_plan.shares_pages:
        num_graphs += 2  # of reading the backlog
        left_bytes += DraftBacklog.num_bytes(plan.slots.dummy_slot + 1, None)
    assert reserved_bytes(plan, draft) - workspaces == num_graphs * BYTES_A_GRAPH + left_bytes
    unguided = BuildPlan(
        LlmArgs.from_kwargs(tiny, max_seq_len=256, guided_decoding_backend=None, **options)
    )
    of_tails = 2 * 2 * len(lengths) * BYTES_A_GRAPH + 8 * (1 + 3) * (1 + 64 // 32) * 4
    assert reserved_bytes(plan, draft) - reserved_bytes(unguided, draft) == of_tails
    if mode != "one_model":
        rounds, drafting = build_keys(tiny, monkeypatch, **options)
        assert {key.draft_len for key in rounds} == {*lengths}
        assert {key.draft_len for key in drafting} == {*drafts_of}
