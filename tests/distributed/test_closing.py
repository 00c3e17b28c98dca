"""How ranks shut down: CUDA graphs are released first, since NCCL waits for those that hold its
collectives, and until the end a rank that is lost is noticed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.communicator import Collectives, Communicator
from tllm_spec.distributed.peer_sums import NoPeerMemory
from tllm_spec.executor.build import build_executor
from tllm_spec.executor.graphs.slot_graphs import GraphPool

MPI = pytest.importorskip("mpi4py.MPI")
CPU = torch.device("cpu")


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
    monkeypatch.setattr(group._watch, "close", lambda: order.append("goodbye"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("ranks part"))
    group.before_close(lambda: order.append("first"))
    group.before_close(lambda: order.append("second"))
    group.close()
    assert order == ["first", "second", "ranks part", "goodbye"]


def test_a_rank_that_is_lost_when_python_ends_already_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 refuses threads then."""
    from tllm_spec.distributed import process_group

    class Ended(BaseException):
        """The process."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def end(status: int) -> None:
        assert status == process_group.FAILED
        raise Ended

    group = process_group.ProcessGroup(MPI.COMM_SELF)
    monkeypatch.setattr(process_group, "LAST_SECONDS", 0)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(Ended):
        group.abort("a reason")


@pytest.mark.parametrize("error", [NoPeerMemory("no access"), RuntimeError("out of memory")])
def test_only_what_all_ranks_have_agreed_on_is_a_reason_for_nccls_sums(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that goes on alone would measure other sums than the rest, or none."""
    from tllm_spec.distributed import process_group

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(process_group, "PeerSums", fail)
    group = process_group.ProcessGroup(MPI.COMM_SELF)
    if isinstance(error, NoPeerMemory):
        group._choose_sums(CPU)
        assert type(group._tensors) is Collectives
    else:
        with pytest.raises(RuntimeError, match="out of memory"):
            group._choose_sums(CPU)
    group.close()
