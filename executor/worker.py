"""The executor's thread: runs rounds while there is work and sleeps otherwise.

It catches every exception that a round raises, `BaseException` included: interrupts and
cancellations are never delivered to this thread, so even a SystemExit comes from a user's drafter
or logits processor and fails a request like any other error."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from tllm_spec.executor.py_executor import PyExecutor
from tllm_spec.executor.request_queue import RequestQueue
from tllm_spec.request_errors import RequestError, described

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# After so long without work, integrity is checked: no request waits for it.
QUIET_SECONDS = 0.05


class Worker:
    """The thread of an executor. `failure` is set if the loop ended by an exception. `on_end` is
    called once with the reason for the end, whichever it is: requests without an answer by then
    never get one."""

    def __init__(
        self, executor: PyExecutor, queue: RequestQueue, on_end: Callable[[str], None]
    ) -> None:
        self._executor = executor
        self._queue = queue
        self._on_end = on_end
        self.failure: str | None = None
        self._ended = False
        self._waiting: list[threading.Event] = []  # of `set_when_idle`
        self._thread = threading.Thread(target=self._main, name="tllm-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop after the round in progress and the cancellations made before this call.
        The caller cancels the requests that are still running."""
        self._queue.close()
        # The executor's own thread gets here if it drops the last reference to the LLM.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def is_current(self) -> bool:
        """Whether this is the executor's thread, which cannot wait for itself."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs a function in the executor's thread between two rounds and returns its result.

        It may read all state; rounds wait for it. What it raises is raised here. Raises
        RuntimeError if the executor has ended, or ends before it runs the function."""
        if self.is_current:
            raise RuntimeError(
                "the executor's thread cannot wait for itself: this is called from inside a round"
            )
        return self.submit(function).result()

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """The same without waiting. Raises RuntimeError if the executor has ended."""
        answer: Future[Result] = Future()

        def run() -> None:
            if self._ended:
                answer.set_exception(RuntimeError(self.why_ended))
                return
            try:
                answer.set_result(function())
            except BaseException as error:  # the caller handles it
                answer.set_exception(error)

        if not self._queue.put_call(run):
            raise RuntimeError(self.why_ended)
        return answer

    @property
    def why_ended(self) -> str:
        """The reason, after the end."""
        return (
            f"the executor has died: {self.failure}"
            if self.failure
            else "the executor has been shut down"
        )

    def fail(self, reason: str) -> None:
        """Fails all requests, when the executor cannot go on and may wait in a round for ever.
        Thread-safe."""
        self.failure = reason
        self._on_end(reason)

    def set_when_idle(self, event: threading.Event) -> None:
        """Sets the event once all that was submitted before has ended, or the executor has."""
        if not self._queue.put_call(lambda: self._waiting.append(event)):
            event.set()

    def wait_until_idle(self) -> None:
        event = threading.Event()
        self.set_when_idle(event)
        event.wait()

    def _main(self) -> None:
        try:
            self._executor.enter_thread()
            while not self._queue.closed:
                for call in self._queue.take_calls():
                    call()
                if not self._round():
                    while self._waiting:
                        self._waiting.pop().set()
                    if not self._queue.wait(QUIET_SECONDS):
                        self._executor.check_integrity()
                        self._queue.wait()
            self._round()
        except BaseException as error:  # process border: nothing above could report it
            logger.exception("the executor died")
            self.failure = self.failure or described(error)
        finally:
            self._ended = True
            for call in self._queue.take_calls(last=True):
                call()
            self._on_end(self.failure or self.why_ended)
            self._queue.end(self.failure)
            while self._waiting:
                self._waiting.pop().set()
            self._executor.close()
            del self._executor  # so that its memory is freed with the last other reference

    def _round(self) -> bool:
        try:
            return self._executor.step()
        except BaseException as error:  # process border: other requests go on
            if not self._queue.all_failed(described(error)):
                raise
            if isinstance(error, RequestError):
                logger.info("a round failed: %s", error)
            else:
                logger.exception("a round failed")
            recover(self._executor, error)
            return True


def recover(executor: PyExecutor, error: BaseException) -> None:
    """Recovers from a round that raised. That reads the round in flight, which may raise, too."""
    try:
        executor.recover(error)
    except BaseException as another:  # process border, as above
        if another is error:
            raise
        logger.exception("the round in flight failed, too")
        executor.recover(another)
