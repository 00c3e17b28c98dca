"""Drafters on the two-model path whose CUDA graphs are replaced by eager ones, and what they
draft."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import eagle3
from tests.executor.graph_rounds import graphs_of, replays_of
from tests.executor.harness import Harness, draft_target, output_of, tensors_of
from tllm_spec.executor.batch import SampledTokens
from tllm_spec.executor.graphs.slot_graphs import (
    Captured,
    GraphKey,
    GraphPool,
    SlotGraphs,
    graph_keys,
)
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter

CPU = torch.device("cpu")
Result = SampledTokens | torch.Tensor | None
DUMMY = 8  # the slot after those of max_batch_size
MODES = ["draft_target", "eagle3"]


def two_model(drafts: tuple[Path, Path], mode: str, **options: Any) -> dict[str, Any]:
    draft, head = drafts
    if mode == "draft_target":
        return draft_target(draft, 3, **options)
    return eagle3(head, 3, eagle3_one_model=False, **options)


@dataclass
class EagerGraph:
    """Stands in for a graph: a replay runs again what was captured, into the same memory, and over
    the results of the others, whose memory it uses. `depth` and `others` are shared."""

    run: Callable[[], Result]
    result: Result
    depth: list[int]
    others: list[SampledTokens | torch.Tensor]
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        self.depth.append(0)
        result = self.run()
        if self.result is not None and result is not None:
            for other in self.others:
                spoil(other)
            for own, new in zip(tensors_of(self.result), tensors_of(result), strict=True):
                own.copy_(new)
        self.depth.pop()


def own_copy(result: SampledTokens | torch.Tensor) -> SampledTokens | torch.Tensor:
    if not isinstance(result, SampledTokens):
        return result.clone()
    rows, num_drafts = (
        None if each is None else each.clone() for each in (result.rows, result.num_drafts)
    )
    tokens, lens = result.new_tokens.clone(), result.new_lens.clone()
    return SampledTokens(tokens, lens, rows, num_drafts=num_drafts)


def spoil(result: SampledTokens | torch.Tensor) -> None:
    for tensor in tensors_of(result):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 1 << 40)
    if isinstance(result, SampledTokens):
        result.new_lens.fill_(99)


def captures_without_a_device(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Captures without a CUDA device. The returned list is not empty while a stand-in replays."""
    inside: list[int] = []
    results: list[SampledTokens | torch.Tensor] = []

    def capture(pool: GraphPool, run: Callable[[], Result]) -> Captured[Result]:
        result = run()
        if result is not None:
            result = own_copy(result)
            spoil(result)  # a capture computes nothing
            results.append(result)
        stand_in: Any = EagerGraph(run, result, inside, results)
        return Captured(stand_in, result)

    monkeypatch.setattr(GraphPool, "capture", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    return inside


@dataclass
class Watched:
    """`eager`: the number of requests of each draft without a graph."""

    harness: Harness
    eager: list[int] = field(default_factory=list)

    @property
    def graphs(self) -> SlotGraphs[Any]:
        """Those that draft: of a draft model's steps, or of the tails of rounds."""
        drafter = self.harness.parts.drafter
        graphs = drafter.graphs if isinstance(drafter, ModelDrafter) else graphs_of(self.harness)
        assert graphs is not None
        return graphs

    def replays(self) -> dict[GraphKey, int]:
        return replays_of(self.graphs)


def watch(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> Watched:
    drafter, watched = harness.parts.drafter, Watched(harness)
    name = "_draft" if isinstance(drafter, ModelDrafter) else "propose"
    original = getattr(drafter, name)

    def eagerly(*arguments: Any) -> Any:
        [group] = [each for each in arguments if isinstance(each, RowGroup)]
        if group.requests:  # a graph's group has slots only
            watched.eager.append(len(group.requests))
        return original(*arguments)

    monkeypatch.setattr(drafter, name, eagerly)
    return watched


def with_graphs(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    sizes: tuple[int, ...],
    draft_lens: set[int],
    *,
    pads: bool = True,
    **options: Any,
) -> Watched:
    harness = Harness(model, **options)
    watched, runner = watch(harness, monkeypatch), harness.parts.runner
    rounds = graph_keys(sizes, lambda _: draft_lens | {0})
    with torch.inference_mode():
        runner.capture_graphs(rounds, pads=pads)
    return watched


def assert_same(ours: list[LlmRequest], theirs: list[LlmRequest]) -> None:
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.counters.by_accepted == other.counters.by_accepted
        assert mine.counters.by_drafted == other.counters.by_drafted
