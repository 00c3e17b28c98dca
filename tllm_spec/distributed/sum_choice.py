"""Which way of summing small tensors is the fastest for each size: measured when the ranks meet,
decided by rank 0."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

import torch

from tllm_spec.distributed.collectives import Collectives

logger = logging.getLogger(__name__)

# Bytes; from one row of a small model to 1,024 rows of a large one. Larger sums are NCCL's.
SIZES = tuple(1 << power for power in range(12, 25))
IN_A_ROW = 50  # sums of a graph that is timed
WEIGHT_SIZE = 4096  # rows and columns of a GEMM before each sum; 32 MiB are not in the L2 cache
NCCL = "nccl"
Way = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds the sum of all ranks' first tensor to the second one."""


class Sum(Protocol):
    """One way of summing. `max_bytes`: of a sum that it can serve."""

    max_bytes: int

    def serves(self, values: torch.Tensor) -> bool:
        """Whether it serves these values: it follows from size, dtype and layout, so it is the same
        on all ranks."""

    def __call__(self, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
        """The sum of all ranks' values, in place. If `add_to` is given it is added to that, and
        `values` is scratch afterwards."""


class ChosenSums(Collectives):
    """Collectives whose sums run in the fastest way for their size. `others`: ways of summing other
    than NCCL's. choice: the fastest one's name for tensors of up to each of `SIZES`."""

    def __init__(self, others: Mapping[str, Sum], choice: Sequence[str]) -> None:
        self._by_size = [others.get(name) for name in choice]

    def all_reduce(self, values: torch.Tensor) -> None:
        if (chosen := self._way_of(values)) is not None:
            chosen(values)
        else:
            super().all_reduce(values)

    def all_reduce_into(self, total: torch.Tensor, values: torch.Tensor) -> None:
        if (chosen := self._way_of(values)) is not None:
            chosen(values, total)
        else:
            super().all_reduce_into(total, values)

    def _way_of(self, values: torch.Tensor) -> Sum | None:
        """None: NCCL's."""
        index = bisect_left(SIZES, values.numel() * values.element_size())
        chosen = self._by_size[index] if index < len(SIZES) else None
        return chosen if chosen is not None and chosen.serves(values) else None


def choose_sums(
    others: Mapping[str, Sum], seconds: Callable[[Way, int], float], share: Callable[[Any], Any]
) -> ChosenSums:
    """seconds: of adding one sum of so many bytes. All ranks measure together, and rank 0's times
    count: `share` returns rank 0's value."""
    times = [
        {NCCL: seconds(nccl_sum, size)}
        | {name: seconds(way, size) for name, way in others.items() if size <= way.max_bytes}
        for size in SIZES
    ]
    choice = share([min(found, key=lambda name: found[name]) for found in times])
    for size, name, found in zip(SIZES, choice, times, strict=True):
        shown = ", ".join(f"{way} {1e6 * time:.1f} us" for way, time in found.items())
        logger.info("sums of up to %d bytes: %s (%s)", size, name, shown)
    return ChosenSums(others, choice)


def nccl_sum(values: torch.Tensor, add_to: torch.Tensor) -> None:
    Collectives().all_reduce_into(add_to, values)


def graph_seconds(device: torch.device) -> Callable[[Way, int], float]:
    """Times a sum as decoding runs it: in a CUDA graph, added to other values, each after a GEMM of
    one row, whose time is subtracted. Back to back a kernel that is slow to launch looks worse than
    it is in a round, where the GEMM hides its launch."""
    weights = torch.zeros(WEIGHT_SIZE, WEIGHT_SIZE, dtype=torch.bfloat16, device=device)
    row = weights.new_zeros(1, WEIGHT_SIZE)
    result = torch.empty_like(row)

    def gemm() -> None:
        torch.mm(row, weights, out=result)

    of_gemms = _seconds_in_graph(gemm, device)

    def seconds(way: Way, num_bytes: int) -> float:
        values = weights.new_zeros(num_bytes // 2)
        total = torch.zeros_like(values)

        def gemm_and_sum() -> None:
            gemm()
            way(values, total)

        return _seconds_in_graph(gemm_and_sum, device) - of_gemms

    return seconds


def _seconds_in_graph(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one piece of work, of many in a row."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no annotation
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()  # lets libraries allocate, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(IN_A_ROW):
            work()
    graph.replay()
    torch.cuda.synchronize(device)
    start = perf_counter()
    graph.replay()
    torch.cuda.synchronize(device)
    return (perf_counter() - start) / IN_A_ROW
