"""Executors with stand-ins for CUDA graphs, their traffic, and what a build would capture."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import torch

from tests.executor.draft_caches import HOT, TREE, one_model
from tests.executor.harness import Harness, draft_target
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.build import prepare_rounds
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.graphs.slot_graphs import (
    CudaGraphs,
    GraphKey,
    GraphPool,
    SlotGraphs,
    graph_keys,
)
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.drafting.drafter import Drafter, When

CPU = torch.device("cpu")
Speculate = Callable[..., dict[str, Any]]  # options of a mode by its name
DUMMY = 8  # the slot after those of max_batch_size
MODES = ["plain", "draft_target", "eagle3", "eagle3_two_model", "draft_target_two_model", "peagle"]
MODES += [*(f"{mode}_tree" for mode in MODES[1:]), "sa"]


class Event:
    """An event of a device that takes 6 ms for any number of replays."""

    def __init__(self, enable_timing: bool) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: "Event") -> float:
        return 6.0


def speculate(tiny_draft: Path, head: Path, mode: str, **options: Any) -> dict[str, Any]:
    if mode.startswith("draft_target_two_model"):
        tree = TREE if mode.endswith("_tree") else {}
        return draft_target(tiny_draft, 3, **tree, **options)
    return one_model(tiny_draft, head, mode, **options)


def with_graphs(
    model: Path, sizes: tuple[int, ...], draft_lens: set[int], *, pads: bool = True, **options: Any
) -> Harness:
    harness = Harness(model, **options)
    shape_of = harness.parts.slots.shapes.of
    capture_rounds(harness, graph_keys(sizes, lambda _: draft_lens, shape_of), pads=pads)
    return harness


@torch.inference_mode()
def capture_rounds(
    harness: Harness, keys: list[GraphKey], *, pads: bool = True, pool: GraphPool | None = None
) -> None:
    """As the composition root does for every key. Windows stay as long as their graphs, as on a
    GPU."""
    harness.executor._narrows = False
    harness.parts.runner.capture_graphs(keys, pads=pads, pool=pool)


def graphs_of(harness: Harness) -> CudaGraphs:
    """Those that end the rounds: of whole rounds, or of tails where all rounds are split."""
    runner = harness.parts.runner
    assert runner.graphs is not None
    return runner.graphs.tails if runner.drafter.when is When.TAIL else runner.graphs.whole


def num_replays(harness: Harness) -> dict[GraphKey, int]:
    """Replays of `graphs_of`."""
    return replays_of(graphs_of(harness))


def replays_of(graphs: SlotGraphs[Any]) -> dict[GraphKey, int]:
    dummies: dict[GraphKey, Any] = {key: own.graph for key, own in graphs.captured.items()}
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


class KeyRecorder:
    """Stands in for a round runner on a CUDA device."""

    engine = SimpleNamespace(attention=SimpleNamespace(supports_graphs=True), adapters=None)
    drafter = Drafter()

    def __init__(self) -> None:
        self.keys: list[GraphKey] = []
        self.graphs: list[GraphKey] | None = None

    def capture_contexts(self, sizes: tuple[int, ...], pool: GraphPool) -> None:
        self.pool = pool

    def capture_graphs(self, keys: list[GraphKey], *, pads: bool, pool: GraphPool) -> None:
        assert pads and pool is self.pool  # the memory of contexts, which need more
        self.keys = self.graphs = keys

    def launch(self, batch: ScheduledBatch) -> Any:
        """Rounds that warm up have the windows of rounds that there will be."""
        sizes = {(key.batch_size, key.shape.depth) for key in self.keys} | {(0, 0)}
        assert (len(batch.generation_requests), batch.shape.depth) in sizes
        return SimpleNamespace(wait=lambda: None)

    def discard_dummy_round(self) -> None:
        return

    def seconds(self, key: GraphKey) -> float:
        assert key in self.keys
        return 1.0

    def seconds_with_contexts(self, key: GraphKey, limits: Any) -> float | None:
        assert key in self.keys
        return None


def keys_of_build(model: Path, **options: Any) -> list[GraphKey]:
    """What the composition root would have captured on a CUDA device."""
    recorder = KeyRecorder()
    plan = BuildPlan(
        LlmArgs.from_kwargs(model, **{"max_batch_size": 8, "max_seq_len": 256} | options)
    )
    plan.device = torch.device("cuda")
    runner: Any = recorder
    prepare_rounds(plan, runner, [])
    return recorder.keys


def on_cuda(model: Path, sizes: list[int] | None, **options: Any) -> Harness:
    graphs = None if sizes is None else {"batch_sizes": sizes}
    harness = Harness(model, device="cuda", cuda_graph_config=graphs, **options)
    assert (harness.parts.runner.graphs is not None) == (sizes is not None)
    return harness
