"""Two ranks of one process, which are threads, in tests of a part of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tllm_spec.distributed.communicator import Communicator, Mapping

RANKS = 2
Result = TypeVar("Result")


class ThreadGroup:
    """What the threads exchange. `num_bytes`: of all that was gathered."""

    def __init__(self) -> None:
        self.barrier, self.values = threading.Barrier(RANKS), [torch.empty(0)] * RANKS
        self.num_bytes, self.said = 0, list[Any]([None] * RANKS)

    def rank(self, rank: int) -> Communicator:
        return ThreadRank(self, rank)

    def run(self, work: Callable[[Communicator], Result]) -> list[Result]:
        """Each rank's result."""
        with ThreadPoolExecutor(RANKS) as pool:
            return list(pool.map(work, [self.rank(rank) for rank in range(RANKS)]))


class ThreadRank(Communicator):
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self.mapping = group, Mapping(rank, RANKS, RANKS)

    def gather(self, value: Any) -> list[Any]:
        group = self._group
        group.said[self.mapping.rank] = value
        group.barrier.wait(60)
        found = list(group.said)
        group.barrier.wait(60)
        return found

    def all_reduce(self, values: torch.Tensor) -> None:
        group = self._group
        group.values[self.mapping.rank] = values.clone()
        group.barrier.wait(60)
        values.copy_(torch.stack(group.values).sum(0))
        group.barrier.wait(60)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        group = self._group
        group.values[self.mapping.rank] = values
        group.barrier.wait(60)
        gathered = torch.cat(group.values, 1)
        if self.mapping.rank == 0:
            group.num_bytes += gathered.numel() * gathered.element_size()
        group.barrier.wait(60)
        return gathered
