"""How the ranks of one model run the same rounds: rank 0 says what has arrived, in one message
before each round, and everything else follows from that on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import msgpack

from tllm_spec.distributed.communicator import Communicator
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.executor.request_wire import pack_requests

END = {"end": True}


class LeaderQueue(RequestQueue):
    """Rank 0's inbox. `take` also tells the other ranks."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__(communicator)
        self._packed: list[list[Any]] = []

    def put(self, requests: list[LlmRequest]) -> bool:
        with self._changed:
            if self._open and requests:
                self._packed.append(_pack(requests))
            return super().put(requests)

    def take(self) -> tuple[list[LlmRequest], dict[int, str]]:
        with self._changed:
            new, cancelled = super().take()
            packed, self._packed = self._packed, []
        self._num_taken += 1
        self._send({"new": packed, "cancelled": list(cancelled.items())})
        return new, cancelled

    def announce(self, name: str, /, **arguments: Any) -> None:
        self._send({"call": name, "arguments": arguments})

    def end(self, failure: str | None) -> None:
        """The other ranks end, too. After a failure they may wait in the middle of a round, so they
        are ended with their processes, and this one."""
        if failure is None:
            self._send(END)
        else:
            self._communicator.abort(failure)

    def _send(self, message: dict[str, Any]) -> None:
        self._communicator.broadcast(msgpack.packb(message))


class RanksEnded(Exception):
    """Rank 0 has ended."""


class FollowerQueue(RequestQueue):
    """Another rank's inbox. `take` waits for rank 0's message; raises RanksEnded after the last.
    `make` turns what `_pack` returned into requests, `calls` has what rank 0 announces by name."""

    make: Callable[[Sequence[Any]], list[LlmRequest]]
    calls: Mapping[str, Callable[..., object]]

    def take(self) -> tuple[list[LlmRequest], dict[int, str]]:
        message = self._communicator.share(None)
        while "call" in message:
            with suppress(ValueError):  # rank 0 raises the same
                self.calls[message["call"]](**message["arguments"])
            message = self._communicator.share(None)
        if message == END:
            raise RanksEnded
        self._num_taken += 1
        new = [request for packed in message["new"] for request in self.make(packed)]
        return new, dict(message["cancelled"])


def _pack(requests: Sequence[LlmRequest]) -> list[Any]:
    """A prompt's requests, their stop strings and their grammar, which each rank compiles."""
    stop, grammar = requests[0].stop_options, requests[0].grammar
    return [
        pack_requests(requests),
        None if stop is None else asdict(stop),
        None if grammar is None else [grammar.source.kind, grammar.source.text],
    ]


def queue_of(communicator: Communicator) -> RequestQueue:
    """The inbox of this rank."""
    if communicator.mapping.world_size == 1:
        return RequestQueue()
    if communicator.mapping.rank == 0:
        return LeaderQueue(communicator)
    return FollowerQueue(communicator)


def agreed(
    communicator: Communicator, decide: Callable[[int], int], *, may_differ: bool
) -> Callable[[int], int]:
    """`decide` of rank 0, if it may differ between ranks, each of which has a clock of its own."""

    def decide_together(number: int) -> int:
        own = decide(number) if communicator.mapping.rank == 0 else 0
        return int.from_bytes(communicator.broadcast(own.to_bytes(4, "little")), "little")

    return decide_together if may_differ and communicator.mapping.world_size > 1 else decide
