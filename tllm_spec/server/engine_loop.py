"""The engine process's main thread: connections of fronts, what they send, and once a second the
load."""

from __future__ import annotations

import logging
import os
import selectors
import socket
from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic

import msgpack

from tllm_spec.executor.faults import described
from tllm_spec.executor.py_executor import Load
from tllm_spec.server.engine_port import EnginePort
from tllm_spec.server.link import Link
from tllm_spec.server.load_log import LoadLog

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
LAST_SECONDS = 1.0  # to send what is left at the end


class EngineLoop:
    """`load` asks the executor for its load."""

    def __init__(
        self, port: EnginePort, listener: socket.socket, load: Callable[[], Future[Load]]
    ) -> None:
        self._port = port
        self._listener = listener
        self._load = load
        self._load_log = LoadLog()
        self._asked: Future[Load] | None = None
        self._next_tick = monotonic()
        self._was_busy = False
        self._stopped = False
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)

    def stop(self) -> None:
        """Ends `run`. Thread-safe."""
        self._stopped = True
        self._wake()

    def run(self) -> None:
        """Serves until `stop`, then sends what is left."""
        while not self._stopped:
            self._step(self._seconds_to_tick())
            self._tick()
        deadline = monotonic() + LAST_SECONDS
        while any(link.has_backlog for link in self._links()) and monotonic() < deadline:
            self._step(max(0.0, deadline - monotonic()))

    def _links(self) -> list[Link]:
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _step(self, seconds: float | None) -> None:
        for key, events in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is None:
                os.read(self._wake_in, 1 << 12)
            else:
                self._serve(key.data, events)
        for link in self._links():
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.has_backlog else 0)
            if self._selector.get_key(link.socket).events != wanted:
                self._selector.modify(link.socket, wanted, link)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        link = Link(connection, self._wake)
        self._selector.register(connection, selectors.EVENT_READ, link)
        self._port.add(link)

    def _serve(self, link: Link, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            link.flush()
        if not events & selectors.EVENT_READ:
            return
        try:
            messages = link.read()
            for message in messages or ():
                self._port.receive(link, message)
        except (ValueError, TypeError, LookupError, msgpack.UnpackException) as error:
            logger.warning("a front process is cut off, it sent nonsense: %s", described(error))
            messages = None
        if messages is None:
            self._selector.unregister(link.socket)
            self._port.remove(link)

    def _wake(self) -> None:
        try:
            os.write(self._wake_out, b"w")
        except BlockingIOError:
            return  # it is full, so the loop wakes anyway

    def _seconds_to_tick(self) -> float | None:
        """None while there is nothing to report."""
        if not (self._port.num_unfinished or self._was_busy or self._asked):
            return None
        return max(0.0, self._next_tick - monotonic())

    def _tick(self) -> None:
        """Reports the load that was asked for a tick before, and asks for the present one."""
        if monotonic() < self._next_tick:
            return
        self._next_tick = monotonic() + TICK_SECONDS
        is_busy = self._port.num_unfinished > 0
        if is_busy or self._was_busy:
            self._port.send_load()
        if self._asked is not None and self._asked.done():
            if self._asked.exception() is None:
                self._load_log.add(self._asked.result())
            self._asked = None
        if (is_busy or self._was_busy) and self._asked is None and not self._stopped:
            try:
                self._asked = self._load()
            except RuntimeError:
                return  # the executor has ended; `stop` follows
        self._was_busy = is_busy
