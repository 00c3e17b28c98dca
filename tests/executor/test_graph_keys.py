"""Which CUDA graphs of rounds are captured."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import eagle3
from tests.executor.draft_graphs import CPU, DUMMY, two_model, with_graphs
from tests.executor.graph_rounds import Event, Speculate, keys_of_build
from tests.executor.harness import Harness, user_provided
from tllm_spec.attention.geometry import KVFormat
from tllm_spec.config.draft_shape import DraftShapes, chain_of
from tllm_spec.config.llm_args import CudaGraphConfig, LlmArgs
from tllm_spec.config.speculative_config import NGramDecodingConfig, UserProvidedDecodingConfig
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.build import prepare_rounds
from tllm_spec.executor.building import plan, rounds
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan, tiers_of_rounds
from tllm_spec.executor.building.rounds import RoundTimer
from tllm_spec.executor.engine.memory_plan import BYTES_A_GRAPH, own_groups
from tllm_spec.executor.graphs.context_graphs import ContextLimits
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, SlotGraphs, graph_keys
from tllm_spec.executor.speculative.draft_length.adaptive import controller_for
from tllm_spec.executor.speculative.drafting.loaded_draft import LoadedDraft
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter
from tllm_spec.executor.speculative.drafting.network_drafter import DraftBacklog


def config(**options: Any) -> NGramDecodingConfig:
    return NGramDecodingConfig(max_draft_len=4, **options)


@pytest.mark.covering
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_concurrency": 5},
        {"draft_len_schedule": {1: 4, 3: 2, 7: 0}},
        {"draft_len_schedule": {1: 4, 4: 1}},
    ],
)
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (3, 8), (8,), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_keys_are_exactly_the_combinations_that_batches_can_have(
    options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    spec = config(**options)
    keys = graph_keys(sizes, controller_for(spec).tiers_at)
    padded = {n: min(size for size in sizes if size >= n) for n in range(1, 9)}
    needed = {
        (padded[n], controller_for(spec).tier_for(n), sampled)
        for n in padded
        for sampled in (False, True)
    }
    assert {(key.batch_size, key.shape.depth, key.sampled) for key in keys} == needed
    assert len(keys) == len(needed)


def test_drafters_that_may_come_with_fewer_drafts_have_a_graph_for_every_length() -> None:
    schedule = {1: 3, 3: 1}
    spec = UserProvidedDecodingConfig(
        drafter="tllm_spec.examples.copy_drafter:CopyDrafter",
        max_draft_len=4,
        draft_len_schedule=schedule,
    )
    keys = graph_keys((2, 4), tiers_of_rounds(controller_for(spec), spec))
    lengths = {size: {key.shape.depth for key in keys if key.batch_size == size} for size in (2, 4)}
    assert lengths == {2: {0, 1, 2, 3}, 4: {0, 1}}


def test_sizes_end_where_the_schedule_changes_so_that_no_batch_pads_beyond() -> None:
    schedule = {1: 4, 6: 0}
    sizes = CudaGraphConfig(batch_sizes=(1, 8)).sizes(
        8, [size - 1 for size in schedule if size > 1]
    )
    spec = config(draft_len_schedule=schedule)
    keys = graph_keys(sizes, controller_for(spec).tiers_at)
    assert {(key.batch_size, key.shape.depth) for key in keys} == {(1, 4), (5, 4), (8, 0)}


def test_the_keys_of_a_build_follow_the_mode_and_the_schedule(
    tiny: Path, speculate: Speculate
) -> None:
    cuts = {"draft_len_schedule": {1: 3, 6: 1}}

    def pairs(mode: str, **options: Any) -> set[tuple[int, int]]:
        keys = keys_of_build(tiny, **speculate(mode, **options))
        return {(key.batch_size, key.shape.depth) for key in keys}

    assert pairs("plain") == {(1, 0), (2, 0), (4, 0), (8, 0)}
    for mode in ("draft_target", "eagle3"):
        plain = {(1, 0), (2, 0), (4, 0), (8, 0)}  # rounds without drafts
        assert pairs(mode) == plain | {(1, 3), (2, 3), (4, 3), (8, 3)}
        assert pairs(mode, **cuts) == plain | {(5, 0)} | {(1, 3), (2, 3), (4, 3), (5, 3), (8, 1)}
    ladder = {"adaptive": {"candidate_steps": [0, 1, 3]}}
    sizes = {(size, steps) for size in (1, 2, 4, 8) for steps in (0, 1, 3)}
    assert pairs("eagle3", **ladder) == sizes
    gate = {"acceptance_rate_threshold": 0.5, "acceptance_rate_window_size": 4}
    assert {steps for _, steps in pairs("eagle3", **gate)} == {0, 3}
    # The draft model may have no pages for drafts.
    assert pairs("draft_target_two_model", **cuts) >= {(4, 0), (4, 3), (8, 0), (8, 1)}
    assert keys_of_build(tiny, cuda_graph_config=None) == []


@pytest.mark.parametrize("mode", ["eagle3", "draft_target", "eagle3_two_model"])
def test_no_graph_has_more_rows_than_the_buffers_of_a_round(
    tiny: Path, speculate: Speculate, mode: str
) -> None:
    keys = keys_of_build(tiny, max_num_tokens=20, **speculate(mode))
    assert keys and all(key.batch_size * (1 + key.shape.depth) <= 20 for key in keys)


# What is captured and set aside at start-up for drafting before the target's forward, and its
# measured time.


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
    timer = RoundTimer(parts.runner, shapes, limits)
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


# How long a replay takes, with a device whose clock is the test's own.


GRAPH_TIMES_CPU = torch.device("cpu")
GRAPH_TIMES_DUMMY = 8


def test_a_replay_is_timed_among_others_when_the_device_has_slowed_down(
    eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that takes 2 ms for a replay after a pause, and 3 ms once it has been busy for 20
    ms."""
    now = 0.0

    def generate(slot_ids: torch.Tensor, draft_len: int, sampled: bool) -> None:
        nonlocal now
        now += 2.0 if now < 20 else 3.0

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.time = -1.0

        def record(self) -> None:
            self.time = now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: "Event") -> float:
            return end.time - self.time

    graphs = SlotGraphs(generate, GRAPH_TIMES_DUMMY, GRAPH_TIMES_CPU)
    graphs.capture([GraphKey(2, chain_of(1), False)])
    now = 0.0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert graphs.seconds(GraphKey(2, chain_of(1), False)) == pytest.approx(0.003)


def test_a_round_is_renewed_before_every_replay_and_runs_for_the_slots_that_were_given(
    eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[object] = []

    def generate(slot_ids: torch.Tensor, draft_len: int, sampled: bool) -> None:
        happened.append(slot_ids.tolist())

    graphs = SlotGraphs(generate, GRAPH_TIMES_DUMMY, GRAPH_TIMES_CPU)
    graphs.capture([GraphKey(3, chain_of(0), False)])
    happened.clear()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert (
        graphs.seconds(
            GraphKey(3, chain_of(0), False), [4, 0, 2], lambda: happened.append("renewed")
        )
        == 0.006 / 5
    )
    assert happened == ["renewed", [4, 0, 2]] * (1 + 5 + 5)
    happened.clear()
    graphs.seconds(GraphKey(3, chain_of(0), False))
    assert happened == [[GRAPH_TIMES_DUMMY] * 3] * (1 + 5 + 5)


# For which numbers of rows a build has linear layers tuned.


class FakeRunner:
    """Stands in for a round runner on a CUDA device."""

    engine = SimpleNamespace(attention=SimpleNamespace(supports_graphs=True), adapters=None)

    def __init__(self, events: list[Any]) -> None:
        self._events = events

    def capture_contexts(self, sizes: tuple[int, ...], *others: Any) -> None:
        self._events += ["contexts"] if sizes else []

    def capture_graphs(self, *graphs: Any, **options: Any) -> None:
        self._events.append("captured")

    def launch(self, batch: ScheduledBatch) -> Any:
        self._events += ["warmed up"] if self._events[-1:] != ["warmed up"] else []
        return SimpleNamespace(wait=lambda: None)

    def discard_dummy_round(self) -> None:
        return


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_gemms_are_tuned_for_all_row_counts_before_graphs_are_captured(
    has_graphs: bool, deterministic: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []

    def tune(models: Any, rows: Any, device: torch.device, communicator: Any) -> None:
        events.append(set(rows))

    monkeypatch.setattr(rounds, "tune_linears", tune)
    monkeypatch.setattr(plan, "has_kernels", lambda device: True)
    options: dict[str, Any] = {
        "max_batch_size": 8,
        "max_num_tokens": 300,
        "deterministic": deterministic,
    }
    if not has_graphs:
        options["cuda_graph_config"] = None
    options |= user_provided(lambda _: [], 2)
    building = plan.BuildPlan(LlmArgs.from_kwargs(tiny, max_seq_len=128, **options))
    building.device = torch.device("cuda")
    runner: Any = FakeRunner(events)
    prepare_rounds(building, runner, [])
    windows = {size * window for size in (1, 2, 4, 8) for window in (1, 2, 3)}
    rows = {300, 37} | (windows if has_graphs else set())
    assert events == ([] if deterministic else [rows]) + (
        ["contexts", "captured"] if has_graphs else []
    ) + ["warmed up"]
