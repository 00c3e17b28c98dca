"""One HTTP connection: uvicorn's h11 protocol with a time limit and a size limit for headers. What
is answered does not depend on the parts in which a request arrives."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tllm_spec.server.refusals import RequestRefused

LINGER_SECONDS = 30.0  # that a client has to read the answer to a request that it is still sending
DROP_RATE = 1 << 23  # bytes a second that are read, and dropped, meanwhile
NOT_HTTP = "this is not an HTTP request"
MAX_HEADER_BYTES = 1 << 16  # of a request
MAX_HEADERS = 256
END_OF_HEAD = re.compile(rb"\n\r?\n")
# In a turn of the event loop a connection has so many events of h11, from parts of so many bytes.
MAX_EVENTS = 32
PART = 1 << 12
# A body may have so many chunks, and one more for so many bytes: each takes as long as they do.
FREE_CHUNKS = 1 << 12
BYTES_PER_CHUNK = 1 << 10
TOO_LARGE = {
    413: "the body has too many small chunks; send larger ones, or its Content-Length",
    431: f"the headers are too large: at most {MAX_HEADER_BYTES} bytes in {MAX_HEADERS} lines are "
    "accepted",
}

logger = logging.getLogger(__name__)
# uvicorn warns of each malformed request, without an address, and of a client that asks for HTTP/2
# and is content with HTTP/1.1.
uvicorn_errors = logging.getLogger("uvicorn.error.connection")
uvicorn_errors.setLevel(logging.ERROR)


class LimitedRequests(h11.Connection):
    """h11 with limits: of headers before they are parsed, of trailers, and of the number of chunks.
    `refusal` says which one was met, or that this is not HTTP.

    It works in turns: after `MAX_EVENTS` events, which also limits the bytes of one turn,
    `next_event` says `NEED_DATA` until `start_turn`. Where there is more, `is_cut` is true then."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEADER_BYTES)
        self.refusal: RequestRefused | None = None
        self.is_cut = False
        self._unread = bytearray()
        self._num_events = self._num_chunks = self._num_bytes = 0

    @property
    def num_unparsed(self) -> int:
        """Counts bytes."""
        return len(self.trailing_data[0]) + len(self._unread)

    def receive_data(self, data: bytes) -> None:
        """As h11's."""
        self._unread += data

    def start_turn(self) -> None:
        self._num_events, self.is_cut = 0, False

    def next_event(self) -> Any:
        """As h11's. Raises h11.RemoteProtocolError."""
        try:
            while self._num_events < MAX_EVENTS:
                self._num_events += 1
                self._check_head()
                event = super().next_event()
                self._check_body(event)
                if event is not h11.NEED_DATA or not self._unread:
                    return event
                super().receive_data(bytes(self._unread[:PART]))
                del self._unread[:PART]
        except h11.RemoteProtocolError as error:
            status = error.error_status_hint
            self.refusal = RequestRefused(400, NOT_HTTP)
            if status in TOO_LARGE:
                self.refusal = RequestRefused(status, TOO_LARGE[status])
            raise
        self.is_cut = True
        return h11.NEED_DATA

    def _check_head(self) -> None:
        data = self.trailing_data[0] if self.their_state is h11.IDLE else b""
        if len(data) <= MAX_HEADER_BYTES and data.count(b"\n") <= MAX_HEADERS:
            return
        end = END_OF_HEAD.search(data)
        size = end.end() if end else len(data)
        if size > MAX_HEADER_BYTES or data.count(b"\n", 0, size) > MAX_HEADERS + 2:
            raise h11.RemoteProtocolError("too large", 431)

    def _check_body(self, event: Any) -> None:
        if event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
            if len(self.trailing_data[0]) > PART:  # of a chunk's first line, or of trailers
                raise h11.RemoteProtocolError("too large", 431)
        elif type(event) is h11.Request:
            self._num_chunks = self._num_bytes = 0
        elif type(event) is h11.Data:
            self._num_chunks += event.chunk_start
            self._num_bytes += len(event.data)
            if self._num_chunks > FREE_CHUNKS + self._num_bytes // BYTES_PER_CHUNK:
                raise h11.RemoteProtocolError("too many chunks", 413)


class LingeringTransport:
    """A transport whose `close` lets a client that `is_sending` read the answer first: if the
    connection were closed at once, it would see a reset. `is_closing` says so meanwhile.

    While it is held, nothing is read, whatever uvicorn's flow control says."""

    def __init__(self, transport: asyncio.Transport, is_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_sending = is_sending
        self._timer: asyncio.TimerHandle | None = None
        self._is_held = self._is_paused = False
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        self.hold(self._is_held)

    def hold(self, is_held: bool) -> None:
        self._is_held = is_held
        if is_held:
            self._transport.pause_reading()
        elif not self._is_paused:
            self._transport.resume_reading()

    def drop(self, data: bytes) -> None:
        """Reads on after a while: a client that sends on after its answer must not take a core."""
        self.hold(True)
        asyncio.get_running_loop().call_later(len(data) / DROP_RATE, self.hold, False)

    def is_closing(self) -> bool:
        return self._timer is not None or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not self._is_sending():
            self._transport.close()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LINGER_SECONDS, self._transport.abort)
        self._is_held = False
        self.resume_reading()
        if self._transport.can_write_eof():
            with suppress(OSError):  # the client has gone
                self._transport.write_eof()

    def lost(self) -> None:
        """The connection has ended."""
        if self._timer is not None:
            self._timer.cancel()


class Turns:
    """Lets connections that have more to parse go on, one of them in each turn of the event loop.
    So however many there are, others wait for one of them only."""

    def __init__(self) -> None:
        self._waiting: dict[Connection, None] = {}

    def add(self, connection: Connection) -> None:
        if not self._waiting:
            connection.loop.call_soon(self._go_on)
        self._waiting[connection] = None

    def _go_on(self) -> None:
        connection = next(iter(self._waiting))
        del self._waiting[connection]
        if self._waiting:
            connection.loop.call_soon(self._go_on)
        connection.handle_events()


class Connection(H11Protocol):  # type: ignore[misc]  # uvicorn's types are not followed
    """`header_timeout`: seconds from the first byte of a request, or from connecting, until its
    headers are complete. A connection that is idle after an answer has uvicorn's time-out. `turns`:
    of all connections of the server. `number`: a younger connection has a larger one."""

    header_timeout: float
    turns: Turns
    number: int

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = LimitedRequests()
        self.logger = uvicorn_errors
        # The state of each request begins as a copy of this.
        self.app_state: dict[str, Any] = {"write_part": self.write_part}
        self.handshake: asyncio.Future[Any] | None = None  # of TLS: before it there is no transport
        self._header_timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle = self.cycle
        return cycle is None or bool(cycle.response_complete or cycle.disconnected)

    @property
    def has_unsent(self) -> bool:
        """Whether an answer waits for its client to read."""
        return self.transport is not None and bool(self.transport.get_write_buffer_size())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(LingeringTransport(transport, self._is_receiving))
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        # After a client's last request what follows is dropped, as h11 does if it comes at once.
        if self.transport.is_closing() or self.conn.their_state is h11.MUST_CLOSE:
            self.transport.drop(data)
            return
        super().data_received(data)
        # Where a next request waits, uvicorn reads on after the answer; the client may go before.
        if self.conn.their_state is h11.DONE and self.conn.num_unparsed <= MAX_HEADER_BYTES:
            self.flow.resume_reading()

    def handle_events(self) -> None:
        """uvicorn's, in turns: between them other connections have theirs."""
        if self.transport.is_closing():
            return
        self.conn.start_turn()
        super().handle_events()
        is_closing = self.transport.is_closing()
        if is_closing or not self.is_idle:
            self._stop_timer()
        elif self.conn.num_unparsed:
            self._await_headers()
        if not is_closing:
            self.transport.hold(self.conn.is_cut)
            if self.conn.is_cut:
                self.turns.add(self)

    def send_400_response(self, msg: str) -> None:
        """Answers what is not HTTP, and headers that are too large. Where that comes after the
        beginning of an answer, as in the body of a GET, the connection is closed."""
        refusal = self.conn.refusal
        assert refusal is not None
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
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()

    def shutdown(self) -> None:
        """Closes the connection after the answer in progress."""
        if self.transport is None:
            self.abort()
        else:
            super().shutdown()

    def _is_receiving(self) -> bool:
        """Whether the client may still be sending what is answered, or what is not HTTP."""
        return self.conn.their_state is h11.SEND_BODY or self.conn.refusal is not None

    def _await_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
