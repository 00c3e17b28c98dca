"""What is captured and set aside at start-up for drafting before the target's forward, and its
measured time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import eagle3
from tests.executor.draft_graphs import CPU, DUMMY, two_model, with_graphs
from tests.executor.graph_rounds import keys_of_build
from tests.executor.harness import Harness
from tllm_spec.attention.geometry import KVFormat
from tllm_spec.config.draft_shape import DraftShapes, chain_of
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.rounds import RoundTimer
from tllm_spec.executor.engine.memory_plan import BYTES_A_GRAPH, own_groups
from tllm_spec.executor.graphs.context_graphs import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, SlotGraphs
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter
from tllm_spec.executor.speculative.drafting.network_drafter import DraftBacklog


def drafting_keys(
    model: Path, monkeypatch: pytest.MonkeyPatch, rounds: list[GraphKey], **options: Any
) -> list[GraphKey]:
    """What a draft model captures when graphs of these rounds were captured."""
    drafter, seen = Harness(model, **options).parts.drafter, list[GraphKey]()
    assert isinstance(drafter, ModelDrafter)
    monkeypatch.setattr(SlotGraphs, "capture", lambda graphs, keys: seen.extend(keys))
    drafter.capture_graphs(SlotGraphs(lambda *_: None, DUMMY, CPU), rounds)
    return seen


def test_drafting_graphs_cover_the_draft_lengths_that_may_be_asked_for(
    tiny: Path, drafts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = two_model(drafts, "draft_target", draft_len_schedule={1: 3, 6: 1})
    rounds = keys_of_build(tiny, **cuts)
    drafting = drafting_keys(tiny, monkeypatch, rounds, **cuts)
    lengths = {(key.batch_size, key.shape.depth) for key in drafting}
    assert lengths == {(1, 3), (2, 3), (4, 3), (5, 3), (8, 1)} and set(drafting) < set(rounds)
    assert {key.sampled for key in drafting} == {False, True}
    ladder = two_model(drafts, "draft_target", adaptive={"candidate_steps": [0, 1, 3]})
    monkeypatch.setattr(RoundTimer, "measure", lambda *_, **__: None)
    drafting = drafting_keys(tiny, monkeypatch, keys_of_build(tiny, **ladder), **ladder)
    assert {key.shape.depth for key in drafting} == {1, 3}
    assert keys_of_build(tiny, cuda_graph_config=None, **ladder) == []


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
def test_a_draft_models_steps_are_timed_with_graphs_and_without(
    tiny: Path, drafts: tuple[Path, Path], depth: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder = two_model(drafts, "draft_target", adaptive={"candidate_steps": [0, 1, 3]})
    parts = with_graphs(monkeypatch, tiny, (1, 4), {1, 3}, **ladder).harness.parts
    monkeypatch.setattr(CudaGraphs, "seconds", lambda graphs, key, *_: 1.0)
    monkeypatch.setattr(SlotGraphs, "seconds", lambda graphs, key: 0.01 * key.shape.depth)
    shapes, limits = DraftShapes.chains(3), ContextLimits(10, 10)
    timer = RoundTimer(parts.runner, shapes, DUMMY, CPU, limits)
    times = timer.measure(parts.controller, (1, 4))
    expected = pytest.approx([1, 1.01, 1.03])
    assert [times.round_time(4, steps) for steps in (0, 1, 3)] == expected
    assert isinstance(parts.drafter, ModelDrafter)
    parts.drafter.graphs = None
    eager = "tllm_spec.executor.speculative.drafting.model_drafter.eager_seconds"
    monkeypatch.setattr(eager, lambda draft: 0.5 + 0 * draft()[0])
    times = timer.measure(parts.controller, (1, 4))
    assert [times.round_time(4, steps) for steps in (0, 1, 3)] == pytest.approx([1, 1.5, 1.5])


@pytest.mark.parametrize(
    ("mode", "forms", "drafts_of"),
    [("draft_target", 2, (3,)), ("eagle3", 1, ()), ("one_model", 2, ())],
)
def test_the_memory_plan_counts_the_captured_graphs_and_their_buffers(
    tiny: Path,
    drafts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    forms: int,
    drafts_of: tuple[int, ...],
) -> None:
    options = eagle3(drafts[1]) if mode == "one_model" else two_model(drafts, mode)
    options |= {"max_batch_size": 8, "cuda_graph_config": {"batch_sizes": [2, 8]}}
    plan = BuildPlan(LlmArgs.from_kwargs(tiny, max_seq_len=256, **options))
    assert plan.draft_plan is not None
    net: Any = SimpleNamespace(config=plan.config)
    draft = LoadedDraft(plan.draft_plan, net, None)
    [group] = plan.config.layer_groups(plan.mapping)
    kv_format = KVFormat(plan.dtype)
    groups = 2 * own_groups([group], kv_format)
    workspaces = 2 * plan.attention.workspace_bytes(group.geometry, kv_format)
    # Greedy and sampled, whole (unless rounds are split) and tails; and forwards.
    num_graphs = 2 * (2 * 2 * forms + 2 + 2 * len(drafts_of))
    left_bytes = 8 * (1 + 3) * (plan.config.hidden_size + 1 + 64 // 32) * 4
    if plan.draft_plan.shares_pages:
        num_graphs += 2  # of reading the backlog
        left_bytes += DraftBacklog.num_bytes(plan.slots.dummy_slot + 1, None)
    assert (
        reserved_bytes(plan, draft, groups) - workspaces == num_graphs * BYTES_A_GRAPH + left_bytes
    )
    unguided = BuildPlan(
        LlmArgs.from_kwargs(tiny, max_seq_len=256, guided_decoding_backend=None, **options)
    )
    of_masks = 2 * 2 * 2 * (forms - 1) * BYTES_A_GRAPH + 8 * (1 + 3) * (1 + 64 // 32) * 4
    reserved = [reserved_bytes(each, draft, groups) for each in (plan, unguided)]
    assert reserved[0] - reserved[1] == of_masks
    rounds = keys_of_build(tiny, **options)
    assert {key.shape.depth for key in rounds} == {0, 3}
    if drafts_of:
        drafting = drafting_keys(tiny, monkeypatch, rounds, **options)
        assert {key.shape.depth for key in drafting} == {*drafts_of}
