"""What all executor tests share: tiny checkpoints, and graphs where there are none."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import tensors_of
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.graphs.graph_pool import Captured, GraphPool


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `tiny` that is often, but not always, of its opinion."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-draft"), noise=0.15)


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
