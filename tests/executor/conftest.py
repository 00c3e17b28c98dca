"""What all executor tests share: tiny checkpoints, and graphs where there are none."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import tensors_of
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.graphs.slot_graphs import Captured, GraphPool


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `tiny` that is often, but not always, of its opinion."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-draft"), noise=0.15)


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head for `tiny`, with the other heads of `write_heads` in its folder."""
    from tests.executor.draft_caches import write_heads

    return write_heads(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with as many layers as the default capture layers need."""
    return write_tiny_llama(tmp_path_factory.mktemp("deep"), num_layers=7)


@pytest.fixture
def speculate(tiny_draft: Path, head: Path) -> Callable[..., dict[str, Any]]:
    """`graph_rounds.speculate` with these drafts."""
    from tests.executor.graph_rounds import speculate

    return partial(speculate, tiny_draft, head)


@pytest.fixture
def depth(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Graphs are captured without a device (`captures_without_a_device`)."""
    from tests.executor.draft_graphs import captures_without_a_device

    return captures_without_a_device(monkeypatch)


class Clock:
    """A test moves it on. Each reading takes a nanosecond, since no time of a round may be 0."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1e-9
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What every module of the executor reads instead of `perf_counter`."""
    clock = Clock()
    for name, module in list(sys.modules.items()):
        if name.startswith("tllm_spec.executor.") and hasattr(module, "perf_counter"):
            monkeypatch.setattr(module, "perf_counter", clock)
    return clock


@dataclass
class EagerGraph:
    """Stands in for a graph where there are none: a replay does the work again, with its result in
    the same memory."""

    run: Callable[[], Any]
    result: Any
    replays: int = 0

    def replay(self) -> None:
        self.replays += 1
        result = self.run()
        for own, new in zip(tensors_of(self.result), tensors_of(result), strict=True):
            own.copy_(new)


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures without a CUDA device."""

    def capture(pool: GraphPool, work: Callable[[], Any]) -> Captured[Any]:
        result = work()
        stand_in: Any = EagerGraph(work, result)
        return Captured(stand_in, result)

    monkeypatch.setattr(GraphPool, "capture", capture)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
