"""The executor's inbox: requests, cancellations and calls from any thread. The executor's thread
takes them between rounds."""

import threading
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from operator import attrgetter
from typing import Any

from tllm_spec.distributed.communicator import SINGLE, Communicator
from tllm_spec.executor.request import LlmRequest

Call = Callable[[], None]


class RequestQueue:
    """Requests and cancellations on their way to the executor. Thread-safe. `take` and `take_calls`
    are the executor's, everything else is for callers."""

    def __init__(self, communicator: Communicator = SINGLE) -> None:
        """communicator: of the ranks that run the same rounds."""
        self._communicator = communicator
        self._num_taken = 0
        self._changed = threading.Condition()
        self._new: list[LlmRequest] = []
        self._cancelled: dict[int, str] = {}  # with the finish reason
        self._calls: list[Call] = []
        self._open = True  # until the executor's thread has ended
        self.closed = False

    def put(self, requests: list[LlmRequest]) -> bool:
        """Queues the requests of one prompt. False when the executor has ended and will never take
        them."""
        with self._changed:
            if self._open:
                self._new += requests
                self._changed.notify()
            return self._open

    def cancel(self, request_id: int, reason: str = "cancelled") -> None:
        """reason: what becomes the request's finish reason."""
        with self._changed:
            self._cancelled[request_id] = reason
            self._changed.notify()

    def put_call(self, call: Call) -> bool:
        """Queues a call to run between two rounds. False when the executor has ended."""
        with self._changed:
            if self._open:
                self._calls.append(call)
                self._changed.notify()
            return self._open

    def take(self) -> tuple[list[LlmRequest], dict[int, str]]:
        """New requests, and the finish reasons of cancelled ones by their ids. Takes no lock when
        there are none, which is the common case of a busy loop."""
        if not self._new and not self._cancelled:
            return [], {}
        with self._changed:
            taken = self._new, self._cancelled
            self._new, self._cancelled = [], {}
            return taken

    def take_calls(self, *, last: bool = False) -> list[Call]:
        """New calls; takes no lock when there are none. After `last` the queue accepts neither
        calls nor requests."""
        if not self._calls and not last:
            return []
        with self._changed:
            self._open = self._open and not last
            taken, self._calls = self._calls, []
            return taken

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify()

    def announce(self, name: str, /, **arguments: Any) -> None:
        """Tells the other ranks to make the call with this name (`FollowerQueue.calls`), as the
        caller does next."""

    def all_failed(self, failure: str) -> bool:
        """Whether a round that raised here did so on every rank, so that all can recover."""
        return self._communicator.all_say(f"round {self._num_taken}: {failure}")

    def end(self, failure: str | None) -> None:
        """Closes the queue: the executor has ended."""

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until something arrives or the queue is closed. False after a timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: bool(self._new or self._cancelled or self._calls or self.closed), seconds
            )


# Requests that wait for a slot, and whose turn is next.
#
# Clients take turns: the client with the fewest running requests is next, and among equals the one
# that has waited longest for a turn. A client of a group takes its turns within those of its
# group. So thousands of requests of one client delay another client's by one turn. It knows no
# slots, pages or devices, and every rank decides alike.


Client = tuple[str, ...]
Rank = tuple[float, int]  # of a request: minus its priority, its arrival

_client = attrgetter("client")


class WaitingRequests:
    """One queue for each client, in the order of `rank`. Iterating goes through all of them in that
    order."""

    def __init__(self, rank: Callable[[LlmRequest], Rank]) -> None:
        self._rank = rank
        self._queues: dict[Client, list[LlmRequest]] = {}
        # Each group and client with waiting requests: their number, and the number of turns taken
        # when it began to wait or had a turn.
        self._num_waiting: Counter[Client] = Counter()
        self._since: dict[Client, int] = {}
        self._num_turns = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[LlmRequest]:
        requests = [request for queue in self._queues.values() for request in queue]
        return iter(sorted(requests, key=self._rank))

    def add(self, request: LlmRequest) -> None:
        insort(self._queues.setdefault(request.client, []), request, key=self._rank)
        for name in _names(request.client):
            self._num_waiting[name] += 1
            self._since.setdefault(name, self._num_turns)

    def remove(self, request: LlmRequest) -> None:
        queue = self._queues[request.client]
        queue.remove(request)
        if not queue:
            del self._queues[request.client]
        for name in _names(request.client):
            self._num_waiting[name] -= 1
            if not self._num_waiting[name]:
                del self._num_waiting[name], self._since[name]

    def take(self, request: LlmRequest) -> None:
        """Removes it: its client has had a turn."""
        self._num_turns += 1
        for name in _names(request.client):
            self._since[name] = self._num_turns
        self.remove(request)

    def next(
        self, running: Sequence[LlmRequest], closed: Set[str] = frozenset()
    ) -> LlmRequest | None:
        """The request to join next: of the highest priority, then of the client whose turn it is,
        the oldest. closed: versions of adapters whose requests are passed over; None: there are no
        others."""
        heads = [queue[0] for queue in self._queues.values()]
        if closed:
            open_ones = (
                next((each for each in queue if each.adapter not in closed), None)
                for queue in self._queues.values()
            )
            heads = [head for head in open_ones if head is not None]
        if len(heads) <= 1:
            return heads[0] if heads else None
        shares = Shares(running)

        def order(head: LlmRequest) -> tuple[float, list[tuple[int, int]], int]:
            priority, arrival = self._rank(head)
            names = _names(head.client)
            return priority, [(shares.of(name), self._since[name]) for name in names], arrival

        return min(heads, key=order)


class Shares:
    """How many running requests each group and each client has."""

    def __init__(self, running: Sequence[LlmRequest]) -> None:
        self._by_client: Counter[Client] = Counter()
        for client, number in Counter(map(_client, running)).items():
            for name in _names(client):
                self._by_client[name] += number

    def of(self, name: Client) -> int:
        return self._by_client[name]

    def largest(self, running: Sequence[LlmRequest]) -> LlmRequest:
        """The last of the running requests whose client has most."""
        shares = [[self.of(name) for name in _names(request.client)] for request in running]
        last = max(range(len(running)), key=lambda index: (shares[index], index))
        return running[last]

    def is_above(self, one: LlmRequest, other: LlmRequest) -> bool:
        """Whether the client of `one` would still have at least as many running requests as that of
        `other` after it gave one of them up to it."""
        for name, theirs in zip(_names(one.client), _names(other.client), strict=False):
            if name != theirs:
                return self.of(name) >= self.of(theirs) + 2
        return False


def _names(client: Client) -> list[Client]:
    """The names of the client's group, if it has one, and of the client."""
    return [client[:end] for end in range(1, len(client) + 1)] or [client]
