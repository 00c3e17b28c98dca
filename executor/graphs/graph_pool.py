"""Captures work as CUDA graphs that share one memory pool.

They never run at the same time, and the replay of one may overwrite the results of another."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from tllm_spec.executor.device.device_span import DeviceSpan
from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.graph_memsets import memsets_as_kernels

Result = TypeVar("Result")


@dataclass(frozen=True)
class Captured(Generic[Result]):
    """A graph, and the tensors that its replays write their results to."""

    graph: torch.cuda.CUDAGraph
    result: Result


class GraphPool:
    """Memory that the graphs of an engine share. Capture the work that needs the most memory first:
    the rest then fits into it. `agree`: makes a number the same on all ranks."""

    def __init__(self, device: torch.device, agree: Callable[[int], int] = int) -> None:
        self._device = device
        self.agree = agree
        self._stream: torch.cuda.Stream | None = None
        self._pool: Any = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture(self, work: Callable[[], Result]) -> Captured[Result]:
        """Raises torch.cuda.OutOfMemoryError."""
        if self._stream is None:
            # One stream for all: torch keeps what a warm-up allocates for the stream it ran on.
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # torch has no annotation
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            work()  # compiles kernels and lets libraries allocate, which a capture must not
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            result = work()
        if nvrtc.is_installed():
            memsets_as_kernels(graph.raw_cuda_graph())
        graph.instantiate()
        self._pool = graph.pool()
        self._graphs.append(graph)
        return Captured(graph, result)

    def release(self) -> None:
        """No graph can be replayed afterwards."""
        if self._graphs:
            torch.cuda.synchronize(self._device)
        while self._graphs:
            self._graphs.pop().reset()


def replay_seconds(
    replay: Callable[[], None],
    in_a_row: float,
    before: Callable[[], None] | None = None,
    agree: Callable[[int], int] = int,
) -> float:
    """The device's time of one replay, in a row of replays that takes `in_a_row` seconds. Another
    such row runs first, since the device's clock is lower under load than after a pause. `before`
    is called before each replay. `agree`: as `GraphPool`; a replay waits for the other ranks'."""
    number = agree(max(1, round(in_a_row / _row_seconds(replay, 1, before))))
    _row_seconds(replay, number, before)
    return _row_seconds(replay, number, before) / number


def _row_seconds(
    replay: Callable[[], None], number: int, before: Callable[[], None] | None
) -> float:
    span = DeviceSpan()
    for _ in range(number):
        if before is not None:
            before()
        replay()
    span.end()
    return span.seconds()
