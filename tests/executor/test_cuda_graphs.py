"""CUDA graphs: which are captured, which is replayed, and that nobody can tell from the text."""

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import HOT, one_model
from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.config import CudaGraphConfig, LlmArgs
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.building.rounds import build_controller
from tllm_spec.executor.draft_lens import controller_for, draft_lens_of_rounds
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.graph_pool import GraphPool
from tllm_spec.executor.graphs.slot_graphs import GraphKey, graph_keys
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.modes import Speculation
from tllm_spec.speculative_config import NGramDecodingConfig

CPU = torch.device("cpu")
DUMMY = 8  # the slot behind those of max_batch_size
MODES = ["plain", "draft_target", "eagle3", "eagle3_two_model", "draft_target_two_model"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_eagle3(tmp_path_factory.mktemp("head"), num_captured=2)


def speculate(tiny_draft: Path, head: Path, mode: str, **options: Any) -> dict[str, Any]:
    if mode == "draft_target_two_model":
        return draft_target(tiny_draft, 3, **options)
    return one_model(tiny_draft, head, mode, **options)


def config(**options: Any) -> NGramDecodingConfig:
    return NGramDecodingConfig(max_draft_len=4, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_concurrency": 5},
        {"draft_len_schedule": {1: 4, 3: 2, 7: 0}},
        {"draft_len_schedule": {4: 1}},
    ],
)
@pytest.mark.parametrize("sizes", [(1, 2, 4, 8), (3, 8), (8,), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_keys_are_exactly_the_combinations_that_batches_can_have(
    options: dict[str, Any], sizes: tuple[int, ...]
) -> None:
    spec = config(**options)
    keys = graph_keys(sizes, controller_for(spec).draft_lens_at)
    padded = {n: min(size for size in sizes if size >= n) for n in range(1, 9)}
    needed = {
        (padded[n], controller_for(spec).steps_for(n), sampled)
        for n in padded
        for sampled in (False, True)
    }
    assert {(key.batch_size, key.draft_len, key.sampled) for key in keys} == needed
    assert len(keys) == len(needed)


def test_drafters_that_may_come_with_fewer_drafts_have_a_graph_for_every_length() -> None:
    spec = config(draft_len_schedule={1: 3, 3: 1})
    keys = graph_keys((2, 4), draft_lens_of_rounds(controller_for(spec), spec, None))
    lengths = {size: {key.draft_len for key in keys if key.batch_size == size} for size in (2, 4)}
    assert lengths == {2: {0, 1, 2, 3}, 4: {0, 1}}


def test_sizes_end_where_the_schedule_changes_so_that_no_batch_pads_beyond() -> None:
    schedule = {1: 4, 6: 0}
    sizes = CudaGraphConfig(batch_sizes=(1, 8)).sizes(
        8, [size - 1 for size in schedule if size > 1]
    )
    spec = config(draft_len_schedule=schedule)
    keys = graph_keys(sizes, controller_for(spec).draft_lens_at)
    assert {(key.batch_size, key.draft_len) for key in keys} == {(1, 4), (5, 4), (8, 0)}


def with_graphs(
    model: Path, sizes: tuple[int, ...], draft_lens: set[int], *, pads: bool = True, **options: Any
) -> Harness:
    harness = Harness(model, **options)
    with torch.inference_mode():
        harness.parts.runner.capture_graphs(
            graph_keys(sizes, lambda _: draft_lens), DUMMY, CPU, pads=pads
        )
    return harness


def num_replays(harness: Harness) -> dict[GraphKey, int]:
    graphs = harness.parts.runner.graphs
    assert graphs is not None
    dummies: dict[GraphKey, Any] = {
        GraphKey(size, draft_len, is_sampled): captured.graph
        for draft_len, tier in graphs.tiers.items()
        for (size, is_sampled), captured in tier.graphs.items()
    }
    return {key: stand_in.replays for key, stand_in in dummies.items() if stand_in.replays}


def submit_mixture(harness: Harness, number: int, is_sampled: bool) -> list[LlmRequest]:
    """Requests of many lengths, so that many batch sizes from `number` down occur; one is alone in
    the end."""
    random = Random(3)
    return [
        harness.submit(
            [random.randrange(64) for _ in range(random.randrange(1, 12))],
            max_tokens=5 + 4 * i + 30 * (i == number - 1),
            temperature=HOT if is_sampled and i % 2 else None,
            top_k=20 if is_sampled and i % 4 == 1 else None,
            draft_limit=(3, 1, 0)[i % 3] if harness.max_draft_len else None,
            seed=i,
        )
        for i in range(number)
    ]


def test_the_slots_of_a_round_are_sent_when_they_are_not_those_of_the_round_before(
    eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[list[int]] = []
    seen: list[list[int]] = []

    def generate(slot_ids: torch.Tensor, draft_len: int, sampled: bool) -> SampledTokens:
        seen.append(slot_ids.tolist())
        return SampledTokens(slot_ids.unsqueeze(1).clone(), slot_ids.clone())

    def to_device(values: list[int], device: torch.device) -> torch.Tensor:
        sent.append(values)
        return torch.tensor(values)

    monkeypatch.setattr("tllm_spec.executor.graphs.slot_graphs.to_device", to_device)
    graphs = CudaGraphs(generate, DUMMY, CPU)
    graphs.capture(graph_keys((2, 4), lambda _: {0, 1}))
    seen.clear()
    rounds = [
        [1, 2, 3],
        [1, 2, 3],
        [1, 3, 2],
        [1, 3],
        [1, 3],
        [5],
        [1, 3, 2],
        [1, 3, 2, 8],
        [1, 3, 2],
    ]
    for slots in rounds:
        for draft_len in (0, 1):
            graphs.replay(slots, draft_len, False)
    padded = [slots + [DUMMY] * (2 + 2 * (len(slots) > 2) - len(slots)) for slots in rounds]
    assert seen == [slots for slots in padded for _ in (0, 1)]
    assert sent == [
        padded[0],
        *(padded[i] for i in range(1, len(padded)) if padded[i] != padded[i - 1]),
    ]


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_what_is_captured_is_the_round_that_runs_without_graphs(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str, is_sampled: bool
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    lengths = {0, 1, 2, 3} if speculation else {0}
    harness, eager = (
        with_graphs(tiny, (1, 4, 8), lengths, **speculation),
        Harness(tiny, **speculation),
    )
    ours, theirs = (submit_mixture(each, 7, is_sampled) for each in (harness, eager))
    harness.run()
    eager.run()
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.counters.by_accepted == other.counters.by_accepted
    assert {key.batch_size for key in num_replays(harness)} == {1, 4, 8}
    # The batch is greedy again when its sampled requests have ended.
    assert any(key.sampled for key in num_replays(harness)) == is_sampled
    assert all_pages_are_back(harness.executor)


@pytest.mark.parametrize("mode", MODES)
def test_the_dummy_slot_of_padded_batches_does_not_grow_and_no_page_is_written_for_it(
    tiny: Path, tiny_draft: Path, head: Path, eager_graphs: None, mode: str
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    harness = with_graphs(tiny, (8,), {0, 1, 2, 3} if speculation else {0}, **speculation)
    slots, table, graphs = harness.parts.slots, harness.parts.kv.table, harness.parts.runner.graphs
    assert graphs is not None
    requests = submit_mixture(harness, 3, is_sampled=True)
    while harness.round():
        owners = sum(
            not request.is_finished for request in requests
        )  # the round in flight may have one more
        assert (graphs._slot_ids[owners + 1 :] == DUMMY).all()
        assert (
            slots.kv_lens[DUMMY] <= 1 + harness.max_draft_len
        )  # of the latest round: each begins with 0
    assert sum(num_replays(harness).values()) > 5
    assert not table.device_rows[DUMMY].any()
    with torch.inference_mode():
        slots.kv_lens[DUMMY] = 100
        slots.reset_dummy()
    assert slots.kv_lens[DUMMY] == 0


def test_what_fits_no_graph_runs_without(tiny: Path, eager_graphs: None) -> None:
    harness, eager = with_graphs(tiny, (1, 2), {0}), Harness(tiny)
    ours, theirs = (
        [each.submit([i, 5], max_tokens=10) for i in range(4)] for each in (harness, eager)
    )
    harness.run()
    eager.run()
    assert not num_replays(harness)  # four at a time, to the end
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    penalised = [
        each.submit([1, 2], max_tokens=10, presence_penalty=0.5) for each in (harness, eager)
    ]
    harness.run()
    eager.run()
    assert not num_replays(harness)  # rules that a graph does not have
    assert output_of(penalised[0]) == output_of(penalised[1])
    simple = [each.submit([1, 2], max_tokens=10) for each in (harness, eager)]
    harness.run()
    eager.run()
    assert num_replays(harness) == {GraphKey(1, 0, False): 9}
    assert output_of(simple[0]) == output_of(simple[1])


def test_without_padding_only_batches_of_a_captured_size_are_replayed(
    tiny: Path, eager_graphs: None
) -> None:
    harness = with_graphs(tiny, (1, 4, 8), {0}, pads=False)
    submit_mixture(harness, 7, is_sampled=False)  # they end one by one
    harness.run()
    assert num_replays(harness).keys() == {GraphKey(1, 0, False), GraphKey(4, 0, False)}


def test_running_out_of_memory_while_capturing_says_which_options_to_lower(
    tiny: Path, eager_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pool: GraphPool, work: Any) -> Any:
        raise torch.cuda.OutOfMemoryError("no more")

    monkeypatch.setattr(GraphPool, "capture", fail)
    message = "out of memory .* of 8 requests with 3 drafts .*cuda_graph_config.max_batch_size, max_draft_len"
    with pytest.raises(ValueError, match=message):
        with_graphs(tiny, (1, 8), {3}, **draft_target(tiny, 3, draft_target_one_model=True))


class KeyRecorder:
    """Stands in for a round runner on a CUDA device."""

    engine = SimpleNamespace(backend=SimpleNamespace(supports_graphs=True))

    def __init__(self) -> None:
        self.keys: list[GraphKey] = []
        self.graphs: list[GraphKey] | None = None

    def capture_contexts(self, sizes: tuple[int, ...], dummy_slot: int, pool: GraphPool) -> None:
        self.pool = pool

    def capture_graphs(
        self,
        keys: list[GraphKey],
        dummy_slot: int,
        device: torch.device,
        *,
        pads: bool,
        pool: GraphPool,
    ) -> None:
        assert (dummy_slot, device.type, pads) == (DUMMY, "cuda", True)
        assert pool is self.pool  # the memory of contexts, which need more
        self.keys = self.graphs = keys

    def launch(self, batch: ScheduledBatch) -> Any:
        """Rounds that warm up have the windows of rounds that there will be."""
        sizes = {(key.batch_size, key.draft_len) for key in self.keys} | {(0, 0)}
        assert (len(batch.generation_requests), batch.draft_len) in sizes
        return SimpleNamespace(wait=lambda: None)

    def forget_round(self) -> None:
        return

    def seconds(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        assert key in self.keys
        return 1.0

    def seconds_with_contexts(self, key: GraphKey, limits: Any) -> float | None:
        assert key in self.keys
        return None


def keys_of_build(model: Path, **options: Any) -> list[GraphKey]:
    """What the composition root would have captured on a CUDA device."""
    built, recorder = Harness(model, **options), KeyRecorder()
    plan = BuildPlan(
        LlmArgs.from_kwargs(model, **{"max_batch_size": 8, "max_seq_len": 256} | options)
    )
    plan.device = torch.device("cuda")
    runner: Any = recorder
    speculation = Speculation(built.parts.drafter, round_end=built.parts.runner.round_end)
    build_controller(plan, runner, speculation, [])
    return recorder.keys


def test_the_keys_of_a_build_follow_the_mode_and_the_schedule(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    cuts = {"draft_len_schedule": {1: 3, 6: 1}}

    def pairs(mode: str, **options: Any) -> set[tuple[int, int]]:
        keys = keys_of_build(tiny, **speculate(tiny_draft, head, mode, **options))
        return {(key.batch_size, key.draft_len) for key in keys}

    assert pairs("plain") == {(1, 0), (2, 0), (4, 0), (8, 0)}
    for mode in ("draft_target", "eagle3"):
        plain = {(1, 0), (2, 0), (4, 0), (8, 0)}  # where nobody wants drafts
        assert pairs(mode) == plain | {(1, 3), (2, 3), (4, 3), (8, 3)}
        assert pairs(mode, **cuts) == plain | {(5, 0)} | {(1, 3), (2, 3), (4, 3), (5, 3), (8, 1)}
    # The draft model may have no pages for anybody's drafts.
    assert pairs("draft_target_two_model", **cuts) >= {(4, 0), (4, 3), (8, 0), (8, 1)}
    rejecting = speculate(tiny_draft, head, "draft_target_two_model", use_rejection_sampling=True)
    assert keys_of_build(tiny, **rejecting) == []
    assert keys_of_build(tiny, cuda_graph_config=None) == []


@pytest.mark.parametrize("mode", ["eagle3", "draft_target", "eagle3_two_model"])
def test_no_graph_has_more_rows_than_the_buffers_of_a_round(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    keys = keys_of_build(tiny, max_num_tokens=20, **speculate(tiny_draft, head, mode))
    assert keys and all(key.batch_size * (1 + key.draft_len) <= 20 for key in keys)


def on_cuda(model: Path, sizes: list[int] | None, **options: Any) -> Harness:
    graphs = None if sizes is None else {"batch_sizes": sizes}
    harness = Harness(model, device="cuda", cuda_graph_config=graphs, **options)
    assert (harness.parts.runner.graphs is not None) == (sizes is not None)
    return harness


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_rounds_in_which_nobody_speculates_are_plain_graphs(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    harness = on_cuda(tiny, [1, 4], **speculate(tiny_draft, head, mode))
    graphs: Any = harness.parts.runner.graphs
    replay, lengths = graphs.replay, []

    def watched(slots: list[int], draft_len: int, sampled: bool) -> SampledTokens | None:
        result = replay(slots, draft_len, sampled)
        lengths.append(draft_len if result is not None else None)
        return result

    graphs.replay = watched
    requests = [harness.submit([i, 2, 3], max_tokens=40, draft_limit=0) for i in range(3)]
    harness.run()
    assert lengths == [0] * 39 and all(request.num_output_tokens == 40 for request in requests)


@pytest.mark.gpu
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_a_replayed_round_is_the_eager_one(
    tiny: Path, tiny_draft: Path, head: Path, mode: str, is_sampled: bool
) -> None:
    speculation = speculate(tiny_draft, head, mode)
    harness, eager = (on_cuda(tiny, sizes, **speculation) for sizes in ([1, 4, 8], None))
    graphs = harness.parts.runner.graphs
    assert graphs is not None
    replay, num_replayed = graphs.replay, []

    def watched(slots: list[int], draft_len: int, sampled: bool) -> SampledTokens | None:
        result = replay(slots, draft_len, sampled)
        num_replayed.append(0 if result is None else len(slots))
        return result

    graphs.replay = watched  # type: ignore[method-assign] # a spy on this one object
    ours, theirs = (submit_mixture(each, 7, is_sampled) for each in (harness, eager))
    harness.run()
    eager.run()
    assert len(num_replayed) > 10 and {1, 7} <= set(num_replayed)
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    assert [r.counters.by_accepted for r in ours] == [r.counters.by_accepted for r in theirs]
    assert all_pages_are_back(harness.executor)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_on_a_gpu_the_dummy_slot_of_padded_batches_does_not_grow(
    tiny: Path, tiny_draft: Path, head: Path, mode: str
) -> None:
    harness = on_cuda(tiny, [8], **speculate(tiny_draft, head, mode))
    submit_mixture(harness, 3, is_sampled=True)
    while harness.round():
        assert harness.parts.slots.kv_lens[DUMMY].item() <= 1 + harness.max_draft_len
    assert not harness.parts.kv.table.device_rows[DUMMY].any()
    with torch.inference_mode():
        harness.parts.slots.reset_dummy()
    assert harness.parts.slots.kv_lens[DUMMY].item() == 0


@pytest.mark.gpu
def test_on_a_gpu_a_batch_above_the_largest_graph_runs_without(tiny: Path) -> None:
    harness, eager = on_cuda(tiny, [2]), on_cuda(tiny, None)
    graphs = harness.parts.runner.graphs
    assert graphs is not None and graphs.replay([0, 1, 2], 0, False) is None
    ours, theirs = (submit_mixture(each, 5, False) for each in (harness, eager))
    harness.run()
    eager.run()
    assert list(map(output_of, ours)) == list(map(output_of, theirs))


@pytest.mark.gpu
def test_on_a_gpu_running_out_of_memory_while_capturing_says_which_options_to_lower(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        raise torch.cuda.OutOfMemoryError("no more")

    monkeypatch.setattr(torch.cuda, "graph", fail)
    with pytest.raises(
        ValueError, match="out of memory while the CUDA graph of 8 requests with 0 drafts"
    ):
        on_cuda(tiny, [1, 8])


def test_an_adaptive_draft_length_has_a_graph_and_a_measured_round_for_all_that_it_may_choose(
    tiny: Path, tiny_draft: Path, head: Path
) -> None:
    options = {"adaptive": {"candidate_steps": [0, 1, 3]}}
    keys = keys_of_build(tiny, **speculate(tiny_draft, head, "eagle3", **options))
    assert {(key.batch_size, key.draft_len) for key in keys} == {
        (size, steps) for size in (1, 2, 4, 8) for steps in (0, 1, 3)
    }
    gate = {"acceptance_rate_threshold": 0.5, "acceptance_rate_window_size": 4}
    keys = keys_of_build(tiny, **speculate(tiny_draft, head, "eagle3", **gate))
    assert {key.draft_len for key in keys} == {0, 3}
