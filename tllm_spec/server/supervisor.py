"""Starts the engine's process and the front processes, restarts a front that dies, and an engine
that dies where there are others, and ends all of them."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from tllm_spec.child_command import module_command
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.distributed.mpirun import mpirun_descriptors
from tllm_spec.server.child import (
    ENDS_SOON,
    SIGNALS,
    ChildSettings,
    engine_process,
    memory_note,
    stop_listening,
)
from tllm_spec.server.wire import new_unpacker, pack

logger = logging.getLogger(__name__)

# Seconds that fronts answer 503 after the engine has died, so that load balancers notice.
DOWN_SECONDS = 1.0
# Seconds that the engine has to say why it failed, after a front has ended before it served.
REASON_SECONDS = 1.0
# Seconds until an engine, or a front, is started again that has not served since it was.
ENGINE_PAUSE, FRONT_PAUSE = 10.0, 1.0
# Seconds after which a process that should have ended is killed.
END_SECONDS = 10.0
BACKLOG = 64
# For glibc: what the threads of a front have taken for large bodies goes back to the system.
FRONT_VARIABLES = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}


class ServeError(ValueError):
    """The server could not start, or its engine has died. has_joined: whether the engine had begun
    to join the other ranks."""

    def __init__(self, message: str, has_joined: bool = False) -> None:
        super().__init__(message)
        self.has_joined = has_joined


class Event(NamedTuple):
    """Something that the supervisor must act on. child: None for a signal."""

    child: Child | None
    kind: str  # "joining", "ready", "failed", "exit", "lost", "restart", "signal"
    value: Any = None


class Child:
    """An engine or a front, in a session of its own: Ctrl-C reaches the supervisor only. Closing
    `control` asks it to end. pause: seconds until it is started again if it has not served."""

    def __init__(
        self, listener: socket.socket, number: int, total: int, *, is_engine: bool
    ) -> None:
        """number: which of `total`; of several, messages and its log lines say so."""
        self.is_engine, self.is_ready = is_engine, False
        kind, alone = ("engine", "the engine") if is_engine else ("front", "a front process")
        log_name = f"{kind} {number}" if total > 1 else ""
        self.name = log_name or alone
        self.pause = ENGINE_PAUSE if is_engine else FRONT_PAUSE
        self._own = {"number": number, "log_name": log_name}
        self._module = f"tllm_spec.server.{kind}_process"
        self._listener = listener
        self._environment = {**({} if is_engine else FRONT_VARIABLES), **os.environ}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, settings: ChildSettings, events: asyncio.Queue[Event]) -> None:
        """Starts it for the first time, or again after it has ended."""
        self.is_ready = False
        ours, theirs = socket.socketpair()
        passed = (theirs.fileno(), self._listener.fileno())
        self.process = await asyncio.create_subprocess_exec(
            *module_command(self._module),
            *map(str, passed),
            stdin=asyncio.subprocess.DEVNULL,
            env=self._environment,
            pass_fds=(*passed, *mpirun_descriptors()),
            start_new_session=True,
        )
        theirs.close()
        reader, self.control = await asyncio.open_connection(sock=ours)
        self.control.write(pack(asdict(settings) | self._own))
        self._tasks = [asyncio.create_task(self._watch(reader, events))]

    def stop(self) -> None:
        self.control.close()

    def kill(self) -> None:
        """The process and those that it has started."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _watch(self, reader: asyncio.StreamReader, events: asyncio.Queue[Event]) -> None:
        unpacker = new_unpacker()
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                unpacker.feed(data)
                for kind, text in unpacker:
                    events.put_nowait(Event(self, kind, text))
        events.put_nowait(Event(self, "exit", await self.process.wait()))


class Supervisor:
    """shutdown_timeout: seconds that fronts have for their requests."""

    def __init__(
        self,
        settings: ChildSettings,
        listener: socket.socket,
        num_fronts: int,
        shutdown_timeout: float,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._num_fronts = num_fronts
        self._shutdown_timeout = shutdown_timeout
        self._num_engines: int = settings.server["dp_size"]
        self._engines: list[Child] = []
        self._fronts: list[Child] = []
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._is_serving = self._has_joined = False
        has_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = [each for each in SIGNALS if each != signal.SIGHUP or not has_nohup]

    def catch_signals(self) -> None:
        """Handles signals that come before `run`: a Ctrl-C while asyncio makes its loop would leave
        half of one, and print a traceback."""
        for number in self._signals:
            signal.signal(
                number, lambda caught, frame: self._events.put_nowait(Event(None, "signal", caught))
            )

    async def run(self) -> int:
        """Serves until a signal. Returns the exit status. Raises ServeError."""
        loop = asyncio.get_running_loop()
        for caught in self._signals:
            event = Event(None, "signal", caught)
            loop.add_signal_handler(caught, self._events.put_nowait, event)
        with _engine_listeners(self._num_engines) as listeners:
            paths = [listener.getsockname() for listener in listeners]
            self._settings = replace(self._settings, engine_paths=paths)
            self._engines = [
                Child(listener, number, self._num_engines, is_engine=True)
                for number, listener in enumerate(listeners)
            ]
            self._fronts = [
                Child(self._listener, number, self._num_fronts, is_engine=False)
                for number in range(self._num_fronts)
            ]
            started: list[Child] = []
            try:
                for child in (*self._engines, *self._fronts):
                    await child.start(self._settings, self._events)
                    started.append(child)
                return await self._serve()
            finally:
                for child in started:
                    child.kill()
                await asyncio.gather(*(child.process.wait() for child in started))

    async def _serve(self) -> int:
        while True:
            event = await self._events.get()
            if event.kind == "signal":
                return await self._end(event.value)
            assert event.child is not None
            if event.kind == "joining":
                self._has_joined = True
            elif event.kind == "ready":
                event.child.is_ready = True
                self._report_ready(event.child)
            elif event.kind == "restart":
                await event.child.start(self._settings, self._events)
            elif self._is_serving and self._is_replaced(event):
                self._restart_later(event)
            elif event.kind == "failed":
                await self._fail(event.value)
            elif event.child.is_engine:
                name = engine_process(LlmArgs(**self._settings.llm).tensor_parallel_size)
                await self._fail(f"{name} ended with {_status(event.value)}{memory_note()}")
            elif event.kind == "lost":
                status = _status(event.value)
                await self._fail(f"{event.child.name} ended with {status}{memory_note()}")
            else:
                lost = event._replace(kind="lost")
                asyncio.get_running_loop().call_later(REASON_SECONDS, self._events.put_nowait, lost)

    def _is_replaced(self, event: Event) -> bool:
        """Whether the server goes on when this child has ended, or says that it has failed: with
        another engine, or without this front, unless none serves and this one cannot."""
        assert event.child is not None
        if event.child.is_engine:
            return self._num_engines > 1
        others = any(front.is_ready for front in self._fronts if front is not event.child)
        return others or event.kind == "exit"

    def _restart_later(self, event: Event) -> None:
        """Event: what a child says before it ends, or its end."""
        child = event.child
        assert child is not None
        if event.kind == "failed":
            logger.error("%s: %s", child.name, event.value)
            return
        seconds = 0.0 if child.is_ready else child.pause
        child.is_ready = False
        logger.error(
            "%s ended with %s and is started again%s%s",
            child.name,
            _status(event.value),
            f" in {seconds:g} s" if seconds else "",
            memory_note(),
        )
        again = Event(child, "restart")
        asyncio.get_running_loop().call_later(seconds, self._events.put_nowait, again)

    def _report_ready(self, child: Child) -> None:
        if self._is_serving and child.is_engine:
            logger.info("%s serves again", child.name)
        children = (*self._engines, *self._fronts)
        if self._is_serving or not all(child.is_ready for child in children):
            return
        self._is_serving = True
        host, port = self._listener.getsockname()[:2]
        scheme = "https" if self._settings.tls else "http"
        shown = f"[{host}]" if ":" in host else host
        name = self._settings.served_model_name
        logger.info("serving %s on %s://%s:%d", name, scheme, shown, port)

    async def _end(self, number: int) -> int:
        """Lets requests finish after a signal. A second signal, or one before anything is served,
        ends the server at once."""
        if not self._is_serving:
            return 128 + number
        if delay := self._settings.server["drain_delay"]:
            logger.info("shutting down in %g s; until then /health says 503", delay)
            for front in self._fronts:
                front.control.write(ENDS_SOON)
            if await self._ended(self._fronts, delay) is False:
                return 128 + number
        logger.info("shutting down; running requests have %g s", self._shutdown_timeout)
        stop_listening(self._listener)
        for front in self._fronts:
            front.stop()
        if not await self._ended(self._fronts, self._shutdown_timeout + END_SECONDS):
            return 128 + number
        for engine in self._engines:
            engine.stop()
        return 0 if await self._ended(self._engines, END_SECONDS) else 128 + number

    async def _fail(self, reason: str) -> None:
        """Raises ServeError. Fronts that serve have told their clients by then."""
        if self._is_serving:
            await self._ended(self._fronts, DOWN_SECONDS)
            for front in self._fronts:
                front.stop()
            await self._ended(self._fronts, END_SECONDS)
        raise ServeError(reason, self._has_joined)

    async def _ended(self, children: list[Child], seconds: float) -> bool | None:
        """Whether all of them end before a signal. None when the time is over."""
        waiting = {child for child in children if child.process.returncode is None}
        deadline = asyncio.get_running_loop().time() + seconds
        while waiting:
            left = deadline - asyncio.get_running_loop().time()
            try:
                event = await asyncio.wait_for(self._events.get(), max(0.0, left))
            except asyncio.TimeoutError:
                return None
            if event.kind == "signal":
                return False
            if event.kind == "exit" and event.child is not None:
                waiting.discard(event.child)
        return True


@contextmanager
def _engine_listeners(number: int) -> Iterator[list[socket.socket]]:
    """Unix sockets in a new folder. Raises ServeError, as on a full disk."""
    listeners = []
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(prefix="tllm-serve-"))
            for index in range(number):
                listeners.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                listeners[-1].bind(str(Path(folder) / f"engine{index}"))
                listeners[-1].listen(BACKLOG)
        except OSError as error:
            raise ServeError(f"no folder for the engine's socket can be made: {error}") from error
        yield listeners


def _status(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"status {code}"
