"""A process that answers messages within limits: one that takes too long is ended, and harms
nothing else."""

from __future__ import annotations

import select
import subprocess
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tllm_spec.child_command import module_command
from tllm_spec.child_messages import read_message, write_message

MAX_START_SECONDS = 120.0


class ChildProcess:
    """Runs a module that calls `answer_messages`; it is started when it is asked for the first
    time, and again after it has ended. first: a message that it gets at its start. One thread at a
    time may ask it."""

    def __init__(self, module: str, first: Any) -> None:
        self._module = module
        self._first = first
        self._child: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None

    def kill(self) -> None:
        """Ends the process, from any thread. Its pipes stay open for the thread that may be reading
        from them."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def start(self) -> None:
        """Starts the process if it does not run, which takes seconds. Raises RuntimeError."""
        if self._child is not None and self._child.poll() is None:
            return
        self._end()
        command = module_command(self._module)
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._child, self._end = child, weakref.finalize(self, _kill, child)
        is_ready = False
        with suppress(TimeoutError):
            is_ready = self._exchange(child, self._first, MAX_START_SECONDS) is not None
        if not is_ready:
            raise RuntimeError(f"the process of {self._module} did not start")

    def ask(self, message: Any, max_seconds: float) -> Any:
        """The answer; None if the process has ended instead. Raises TimeoutError, after which the
        process has ended, too, and RuntimeError if it does not start."""
        self.start()
        assert self._child is not None
        return self._exchange(self._child, message, max_seconds)

    def _exchange(self, child: subprocess.Popen[bytes], message: Any, max_seconds: float) -> Any:
        """As `ask`, of a process that runs."""
        assert child.stdin is not None
        answer = None
        try:
            with suppress(BrokenPipeError):
                write_message(child.stdin, message)
                answer = _receive(child, max_seconds)
        finally:
            if answer is None:  # its pipes close before the system counts it as ended
                self._end()
        return answer


def _receive(child: subprocess.Popen[bytes], seconds: float) -> Any:
    """A message; None if the process has ended. Raises TimeoutError."""
    assert child.stdout is not None
    poll = select.poll()  # unlike `select`, it takes any number of open files
    poll.register(child.stdout, select.POLLIN)
    if not poll.poll(seconds * 1000):
        raise TimeoutError
    return read_message(child.stdout)


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(BrokenPipeError):  # of a message that the process has not read
            pipe.close()
