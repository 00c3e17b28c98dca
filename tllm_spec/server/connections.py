"""One HTTP connection: uvicorn's h11 protocol with a time limit and a size limit for headers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 1 << 16

logger = logging.getLogger(__name__)


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn's types are not followed
    """`header_timeout`: seconds from the first byte of a request, or from connecting, until its
    headers are complete. A connection that is idle after an answer has uvicorn's time-out."""

    header_timeout: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # The state of each request begins as a copy of this.
        self.app_state: dict[str, Any] = {"write_part": self.write_part}
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = 0

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.is_idle:
            self._stop_timer()
            return
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()
        elif not self.transport.is_closing():
            self._await_headers()

    def _should_upgrade(self) -> bool:
        """Java's client asks for HTTP/2 this way and is content with HTTP/1.1. uvicorn would log
        two warnings."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def write_part(self, data: bytes) -> bool:
        """Sends a part of the answer in progress, if that needs no waiting. It does what uvicorn
        and h11 do with a part, in a twentieth of the time."""
        is_chunked = self.scope["http_version"] == "1.1"
        if not is_chunked or self.flow.write_paused or self.cycle.disconnected:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def abort(self) -> None:
        """Closes the connection without sending what is left."""
        self.transport.abort()

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self.abort)

    def _stop_timer(self) -> None:
        self._num_header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
