"""One HTTP connection: uvicorn's h11 protocol with a time limit and a size limit for headers. What
is answered does not depend on the parts in which a request arrives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tllm_spec.server.refusals import HEADERS_TOO_LARGE, MAX_HEADER_BYTES, RequestRefused

LINGER_SECONDS = 30.0  # that a client has to read the answer to a request that it is still sending
TOO_LARGE = 431

logger = logging.getLogger(__name__)
# uvicorn warns of each malformed request, without an address.
uvicorn_errors = logging.getLogger("uvicorn.error.connection")
uvicorn_errors.setLevel(logging.ERROR)


class LimitedRequests(h11.Connection):
    """h11 has a limit for headers whose end is missing only. Here they have it, too, when their end
    has come with them."""

    is_too_large = False

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)

    def next_event(self) -> Any:
        """As h11's. Raises h11.RemoteProtocolError."""
        num_before = self._num_unparsed() if self.their_state is h11.IDLE else 0
        try:
            event = super().next_event()
            if type(event) is h11.Request and num_before - self._num_unparsed() > MAX_HEADER_BYTES:
                raise h11.RemoteProtocolError(HEADERS_TOO_LARGE, TOO_LARGE)
        except h11.RemoteProtocolError as error:
            self.is_too_large = error.error_status_hint == TOO_LARGE
            raise
        return event

    def _num_unparsed(self) -> int:
        return len(self.trailing_data[0])


class LingeringTransport:
    """A transport whose `close` lets a client that `is_sending` read the answer first: if the
    connection were closed at once, it would see a reset. `is_closing` says so meanwhile."""

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_sending = is_sending
        self._timer: asyncio.TimerHandle | None = None
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._is_sending():
            self._transport.close()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LINGER_SECONDS, self._transport.abort)
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            with suppress(OSError):  # the client has gone
                self._transport.write_eof()

    def lost(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn's types are not followed
    """`header_timeout`: seconds from the first byte of a request, or from connecting, until its
    headers are complete. A connection that is idle after an answer has uvicorn's time-out."""

    header_timeout: float

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = LimitedRequests()
        self.logger = uvicorn_errors
        # The state of each request begins as a copy of this.
        self.app_state: dict[str, Any] = {"write_part": self.write_part}
        self._header_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle = self.cycle
        return cycle is None or bool(cycle.response_complete or cycle.disconnected)

    @property
    def has_unsent(self) -> bool:
        """Whether an answer waits for its client to read."""
        return bool(self.transport.get_write_buffer_size())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(LingeringTransport(transport, self._is_receiving))
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if not self.is_idle or self.transport.is_closing():
            self._stop_timer()
        else:
            self._await_headers()

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, and headers that are too large. Where that comes after the
        beginning of an answer, as in the body of a GET, the connection is closed."""
        refusal = (
            RequestRefused(TOO_LARGE, HEADERS_TOO_LARGE)
            if self.conn.is_too_large
            else RequestRefused(400, "this is not an HTTP request")
        )
        logger.info("%s:%d: %s", *(self.client or ("?", 0)), refusal)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = refusal.response()
            head = [*answer.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=answer.status_code, headers=head),
                h11.Data(data=bytes(answer.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event))
        if not self.is_idle:  # the application must not answer any more
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _should_upgrade(self) -> bool:
        """Java's client asks for HTTP/2 this way and is content with HTTP/1.1. uvicorn would log
        two warnings."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.transport.lost()
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

    def _is_receiving(self) -> bool:
        """Whether the client may still be sending what is answered, or what is not HTTP."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
