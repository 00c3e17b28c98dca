"""The executor's inbox: requests, cancellations and calls from any thread. The executor's thread
takes them between rounds."""

import threading
from collections.abc import Callable

from tllm_spec.executor.request import LlmRequest

Call = Callable[[], None]


class RequestQueue:
    """Requests and cancellations on their way to the executor. Thread-safe. `take` and `take_calls`
    are the executor's, everything else is for callers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: list[LlmRequest] = []
        self._cancelled: dict[int, str] = {}  # with the finish reason
        self._calls: list[Call] = []
        self._open = True  # until the executor's thread has ended
        self._closed = False

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
            self._closed = True
            self._changed.notify()

    def announce_swap(self, folder: str, *, keep_cache: bool) -> None:
        """Tells the other ranks to call `DraftWeights.swap_together`, as the caller does next."""

    def all_failed(self, failure: str) -> bool:
        """Whether a round that raised here did so on every rank, so that all can recover."""
        return True

    def end(self, failure: str | None) -> None:
        """Closes the queue: the executor has ended."""

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until something arrives or the queue is closed. False after a timeout."""
        with self._changed:
            return self._changed.wait_for(self._is_ready, seconds)

    def _is_ready(self) -> bool:
        return bool(self._new or self._cancelled or self._calls or self._closed)
