"""How ranks part: CUDA graphs are released first, since NCCL waits for those that hold its
collectives."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tllm_spec.config import LlmArgs
from tllm_spec.distributed.communicator import Communicator
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.graphs.graph_pool import GraphPool

MPI = pytest.importorskip("mpi4py.MPI")


class Remembering(Communicator):
    def __init__(self) -> None:
        self.releases: list[Callable[[], None]] = []

    def before_close(self, release: Callable[[], None]) -> None:
        self.releases.append(release)


def test_the_graphs_of_an_executor_are_released_before_the_ranks_part() -> None:
    """Its pool of graphs is empty on a CPU, so one stands in for them."""
    communicator, graph = Remembering(), mock.Mock()
    args = LlmArgs.from_kwargs("zoo:llama", device="cpu")
    built = build_executor(args, None, lambda responses: None, communicator)
    (release,) = communicator.releases
    pool = release.__self__  # type: ignore[attr-defined] # of a bound method
    assert isinstance(pool, GraphPool)
    pool._graphs.append(graph)
    with mock.patch.object(torch.cuda, "synchronize"):
        release()
    graph.reset.assert_called_once_with()
    del built


def test_a_group_parts_after_all_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    from tllm_spec.distributed.process_group import ProcessGroup

    order: list[str] = []
    group = ProcessGroup(MPI.COMM_SELF)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("ranks part"))
    group.before_close(lambda: order.append("first"))
    group.before_close(lambda: order.append("second"))
    group.close()
    assert order == ["first", "second", "ranks part"]
