"""A connection to one front process, at the engine's end: any thread sends, one thread reads."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

from tllm_spec.server.wire import new_unpacker, pack

READ_BYTES = 1 << 20
# A front that does not read is cut off beyond this.
MAX_BACKLOG_BYTES = 256 << 20


class Link:
    """`on_backlog` is called when `flush` must be called once the socket can be written to."""

    def __init__(self, connection: socket.socket, on_backlog: Callable[[], None]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_open = True
        self._on_backlog = on_backlog
        self._unpacker = new_unpacker()
        self._lock = threading.Lock()
        self._backlog = bytearray()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def send(self, message: Any) -> None:
        """Sends without waiting. What the socket does not take is sent later."""
        data = pack(message)
        with self._lock:
            if not self.is_open:
                return
            if self._backlog:
                self._backlog += data
                if len(self._backlog) > MAX_BACKLOG_BYTES:
                    self._cut_off()
                return
            num_sent = self._send(data)
            if num_sent == len(data):
                return
            self._backlog += memoryview(data)[num_sent:]
        self._on_backlog()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        with self._lock:
            if self.is_open and self._backlog:
                del self._backlog[: self._send(self._backlog)]

    def read(self) -> list[Any] | None:
        """The messages that have arrived. None when the front has gone."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._unpacker.feed(data)
        return list(self._unpacker)

    def close(self) -> None:
        with self._lock:
            self.is_open = False
            self._backlog.clear()
            self.socket.close()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader will find it closed, too
            self._cut_off()
            return len(data)

    def _cut_off(self) -> None:
        self.is_open = False
        self._backlog.clear()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed by the other end
