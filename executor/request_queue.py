"""The executor's inbox: requests and cancellations from any thread, taken once a round by the executor's."""

import threading

from tllm_spec.executor.request import LlmRequest


class RequestQueue:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._new: list[LlmRequest] = []
        self._cancelled: list[int] = []
        self._closed = False

    def put(self, requests: list[LlmRequest]) -> None:
        with self._changed:
            self._new += requests
            self._changed.notify()

    def cancel(self, request_id: int) -> None:
        with self._changed:
            self._cancelled.append(request_id)
            self._changed.notify()

    def take(self) -> tuple[list[LlmRequest], list[int]]:
        """Everything that came since the last call. Unlocked when there is nothing: the common case of a busy loop."""
        if not self._new and not self._cancelled:
            return [], []
        with self._changed:
            taken = self._new, self._cancelled
            self._new, self._cancelled = [], []
            return taken

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    @property
    def closed(self) -> bool:
        return self._closed

    def wait(self) -> None:
        """Until something comes or the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._new or self._cancelled or self._closed)
