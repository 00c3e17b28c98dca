"""How the ranks of one model run the same rounds: rank 0 says what has arrived, in one message
before each round, and everything else follows from that on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from tllm_spec.distributed.communicator import Communicator
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.request_queue import RequestQueue

END = {"end": True}


class LeaderQueue(RequestQueue):
    """Rank 0's inbox. `take` also tells the other ranks."""

    is_shared = True

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator
        self._specs: list[Mapping[str, Any]] = []

    def put(self, requests: list[LlmRequest], spec: Mapping[str, Any] | None = None) -> bool:
        assert spec is not None, "the other ranks need the request as plain data"
        with self._changed:
            if self._open:
                self._specs.append(spec)
            return super().put(requests)

    def take(self) -> tuple[list[LlmRequest], list[int]]:
        with self._changed:
            new, cancelled = super().take()
            specs, self._specs = self._specs, []
        self._send({"new": specs, "cancelled": cancelled})
        return new, cancelled

    def end(self, failure: str | None) -> None:
        """The other ranks end, too. After a failure they may wait in the middle of a round, so they
        are ended with their processes, and this one."""
        if failure is None:
            self._send(END)
        else:
            self._communicator.abort()

    def _send(self, message: dict[str, Any]) -> None:
        self._communicator.broadcast(msgpack.packb(message))


class RanksEnded(Exception):
    """Rank 0 has ended."""


class FollowerQueue(RequestQueue):
    """Another rank's inbox. `take` waits for rank 0's message; raises RanksEnded after the last.
    `make` turns a request's plain data into requests."""

    is_shared = True
    make: Callable[[Mapping[str, Any]], list[LlmRequest]]

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self._communicator = communicator

    def take(self) -> tuple[list[LlmRequest], list[int]]:
        message = msgpack.unpackb(self._communicator.broadcast(b""))
        if message == END:
            raise RanksEnded
        return [each for spec in message["new"] for each in self.make(spec)], message["cancelled"]


def queue_of(communicator: Communicator) -> RequestQueue:
    """The inbox of this rank."""
    if communicator.mapping.world_size == 1:
        return RequestQueue()
    if communicator.mapping.rank == 0:
        return LeaderQueue(communicator)
    return FollowerQueue(communicator)


def agreed(communicator: Communicator, decide: Callable[[int], int]) -> Callable[[int], int]:
    """`decide` of rank 0, for what may differ between ranks."""

    def decide_together(number: int) -> int:
        own = decide(number) if communicator.mapping.rank == 0 else 0
        return int.from_bytes(communicator.broadcast(own.to_bytes(4, "little")), "little")

    return decide if communicator.mapping.world_size == 1 else decide_together
