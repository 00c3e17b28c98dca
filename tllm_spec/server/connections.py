"""One HTTP connection: uvicorn's h11 protocol with a time limit and a size limit for headers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tllm_spec.server.refusals import HEADERS_TOO_LARGE, MAX_HEADER_BYTES, RequestRefused

LINGER_SECONDS = 5.0  # after a refusal

logger = logging.getLogger(__name__)
# uvicorn warns of each malformed request, without an address.
uvicorn_errors = logging.getLogger("uvicorn.error.connection")
uvicorn_errors.setLevel(logging.ERROR)


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn's types are not followed
    """`header_timeout`: seconds from the first byte of a request, or from connecting, until its
    headers are complete. A connection that is idle after an answer has uvicorn's time-out."""

    header_timeout: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.logger = uvicorn_errors
        # The state of each request begins as a copy of this.
        self.app_state: dict[str, Any] = {"write_part": self.write_part}
        self._header_timer: asyncio.TimerHandle | None = None
        self._is_refused = False

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        super().data_received(data)
        if not self.is_idle:
            self._stop_timer()
        elif not self.transport.is_closing():
            self._await_headers()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, and headers that are too large for h11 while their end is
        missing. What the client still sends is read and dropped until it has seen the answer: if
        the connection were closed at once, it would see a reset."""
        unparsed, _ = self.conn.trailing_data
        is_large = len(unparsed) > MAX_HEADER_BYTES
        refusal = (
            RequestRefused(431, HEADERS_TOO_LARGE)
            if is_large
            else RequestRefused(400, "this is not an HTTP request")
        )
        logger.info("%s:%d: %s", *(self.client or ("?", 0)), refusal)
        answer = refusal.response()
        head = [*answer.raw_headers, (b"connection", b"close")]
        self._is_refused = True
        self._stop_timer()
        self._header_timer = self.loop.call_later(LINGER_SECONDS, self.abort)
        for event in (
            h11.Response(status_code=answer.status_code, headers=head),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

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
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
