"""The executor's inbox: requests, cancellations and calls from any thread, taken between rounds by
the executor's."""

import threading
from collections.abc import Callable

from tllm_spec.executor.request import LlmRequest

Call = Callable[[], None]


class RequestQueue:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: list[LlmRequest] = []
        self._cancelled: list[int] = []
        self._calls: list[Call] = []
        self._open = True  # until the executor's thread has ended
        self._closed = False

    def put(self, requests: list[LlmRequest]) -> bool:
        """False when nobody will ever take them."""
        with self._changed:
            if self._open:
                self._new += requests
                self._changed.notify()
            return self._open

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify()

    def put_call(self, call: Call) -> bool:
        """Something to be run between two rounds. False when nobody will ever run it."""
        with self._changed:
            if self._open:
                self._calls.append(call)
                self._changed.notify()
            return self._open

    def take(self) -> tuple[list[LlmRequest], list[int]]:
        """Everything that came since the last call. Unlocked when there is nothing: the common case
        of a busy loop."""
        if not self._new and not self._cancelled:
            return [], []
        with self._changed:
            taken = self._new, self._cancelled
            self._new, self._cancelled = [], []
            return taken

    def take_calls(self, *, last: bool = False) -> list[Call]:
        """Those that came since the last time; unlocked when there are none. After the `last` time
        no more are taken in, nor requests."""
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

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self, seconds: float | None = None) -> bool:
        """Until something comes or the queue is closed; False when neither did in the given
        time."""
        with self._changed:
            return self._changed.wait_for(self._has_news, seconds)

    def _has_news(self) -> bool:
        return bool(self._new or self._cancelled or self._calls or self._closed)
