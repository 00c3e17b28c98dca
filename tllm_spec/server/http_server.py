"""Accepts connections and runs the application on them: uvicorn's protocol, with a limit on the
number of connections and a shutdown that has a deadline.

uvicorn's own server was tried with `limit_concurrency` and `timeout_graceful_shutdown`. At the
limit it refuses requests with 503 while idle connections stay, without a free file it hangs, and
at the deadline it cancels streams without an error event."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from itertools import count
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from tllm_spec.server.bodies import Message, Receive
from tllm_spec.server.child import OTHER_FILES, raise_file_limit, stop_listening
from tllm_spec.server.connections import Connection, Turns
from tllm_spec.server.guard import App, Send
from tllm_spec.server.options import ServerOptions

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that the kernel holds until they are accepted
FILES_EXHAUSTED_PAUSE = 0.1  # seconds until the next try to accept
DRAIN_PAUSE = 0.02  # seconds between two looks at what is left when the server ends
LAST_WORDS = 0.5  # seconds for the answers to requests that were ended at the deadline


@dataclass(frozen=True)
class Tls:
    """Files in PEM format, as uvicorn takes them."""

    certfile: str
    keyfile: str | None = None
    keyfile_password: str | None = None
    ca_certs: str | None = None


class HttpServer:
    """Serves `app` on a listening socket. Raises ValueError for TLS files that cannot be loaded."""

    def __init__(self, app: Any, options: ServerOptions, tls: Tls | None = None) -> None:
        files = {f"ssl_{name}": value for name, value in vars(tls).items()} if tls else {}
        self._protocol: type[Connection] = type(
            "Limited",
            (Connection,),
            {"header_timeout": options.header_timeout, "turns": Turns()},
        )
        self._config = uvicorn.Config(
            _without_rest(app),
            http=self._protocol,
            ws="none",
            log_config=None,
            access_log=False,
            timeout_keep_alive=options.timeout_keep_alive,
            server_header=False,
            proxy_headers=bool(options.trusted_proxies),
            forwarded_allow_ips=list(options.trusted_proxies),
            **files,
        )
        try:
            self._config.load()
        except OSError as error:  # ssl.SSLError is one, too
            raise ValueError(f"--ssl_certfile or --ssl_keyfile: {error}") from error
        self._state = ServerState()
        self._numbers = count()  # of connections, in the order of their arrival
        self._tls: dict[str, Any] = {}
        if self._config.ssl is not None:
            limit = options.header_timeout  # of the handshake, and then again of the first request
            self._tls = {"ssl": self._config.ssl, "ssl_handshake_timeout": limit}
        self._shutdown_timeout = options.shutdown_timeout
        self._max_connections = options.max_connections

    async def serve(
        self,
        listener: socket.socket,
        stop: asyncio.Event,
        end_requests: Callable[[], None],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Serves until `stop`. Then running requests have `shutdown_timeout` seconds;
        `end_requests` ends those that are left. `on_ready` is called once connections are accepted.

        Raises ValueError if another process listens on the address since it was bound."""
        self._max_connections = min(self._max_connections, raise_file_limit() - OTHER_FILES)
        listener.setblocking(False)
        try:
            listener.listen(BACKLOG)
        except OSError as error:
            host, port = listener.getsockname()[:2]
            raise ValueError(f"cannot listen on {host}, port {port}: {error}") from error
        accepting = asyncio.create_task(self._accept_all(listener))
        clock = asyncio.create_task(self._keep_date())
        on_ready()
        try:
            await stop.wait()
            accepting.cancel()
            await asyncio.wait([accepting])  # the loop watches the socket until then
            stop_listening(listener)
            listener.close()
            await self._drain(end_requests)
        finally:
            accepting.cancel()
            clock.cancel()

    async def _accept_all(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                await _readable(listener)
                continue
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return  # another process has ended the listening
                logger.warning("no connection can be accepted: %s", error)
                await asyncio.sleep(FILES_EXHAUSTED_PAUSE)
                continue
            connection.setblocking(False)
            try:
                await self._make_room()
            except asyncio.CancelledError:
                connection.close()
                raise
            await self._start(connection)

    async def _start(self, connection: socket.socket) -> None:
        protocol = self._protocol(config=self._config, server_state=self._state, app_state={})
        protocol.number = next(self._numbers)
        self._state.connections.add(protocol)  # it counts from now on
        loop = asyncio.get_running_loop()
        start = loop.connect_accepted_socket(lambda: protocol, connection, **self._tls)
        if not self._tls:
            await start
        else:  # a handshake waits for the client
            protocol.handshake = asyncio.ensure_future(start)
            ended = partial(self._handshake_ended, protocol, connection)
            protocol.handshake.add_done_callback(ended)

    def _handshake_ended(
        self, protocol: Connection, connection: socket.socket, task: asyncio.Future[Any]
    ) -> None:
        if task.cancelled() or task.exception():
            self._state.connections.discard(protocol)
            connection.close()  # the task may have been cancelled before it began
            logger.debug("a TLS handshake failed: %r", task)

    async def _make_room(self) -> None:
        """Closes, at the limit, the oldest connection without a request, or waits for an answer to
        end. One whose answer is sent goes before one that has not read it."""
        while len(self._state.connections) >= self._max_connections:
            all_idle = (each for each in self._state.connections if each.is_idle)
            idle = min(all_idle, key=lambda each: (each.has_unsent, each.number), default=None)
            if idle is not None:
                idle.abort()
            await asyncio.sleep(0 if idle is not None else FILES_EXHAUSTED_PAUSE)

    async def _keep_date(self) -> None:
        while True:
            self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
            await asyncio.sleep(1)

    async def _drain(self, end_requests: Callable[[], None]) -> None:
        for connection in list(self._state.connections):
            connection.shutdown()
        if not await self._all_ended(self._shutdown_timeout):
            unsent = sum(each.has_unsent for each in self._state.connections)
            number = max(len(self._state.tasks), unsent)
            logger.warning("%d requests did not end within %g s", number, self._shutdown_timeout)
            end_requests()
            await self._all_ended(LAST_WORDS)
        for connection in list(self._state.connections):
            connection.abort()
        for task in list(self._state.tasks):
            task.cancel()
        await asyncio.gather(*self._state.tasks, return_exceptions=True)

    async def _all_ended(self, seconds: float) -> bool:
        """Whether all requests have been answered within the time, and all answers sent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self._state.tasks or any(each.has_unsent for each in self._state.connections):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(DRAIN_PAUSE)
        return True


def _without_rest(app: App) -> App:
    """The application, whose answer is the last one of its connection if it comes before the end of
    the request's body. So the rest of the body is not read: of a route that takes none, and of a
    request that is refused."""

    async def run(scope: Any, receive: Receive, send: Send) -> None:
        has_rest = any(
            name == b"transfer-encoding" or (name == b"content-length" and int(value))
            for name, value in scope.get("headers", ())
        )

        async def receive_and_look() -> Message:
            nonlocal has_rest
            message = await receive()
            has_rest = has_rest and message.get("more_body", False)
            return message

        async def send_the_last(message: Message) -> None:
            if has_rest and message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        await app(scope, receive_and_look, send_the_last)

    return run


async def _readable(listener: socket.socket) -> None:
    """Returns once a connection waits. `loop.sock_accept` is not used: when it is cancelled while a
    connection arrives, it accepts it nevertheless, and drops it with a traceback in the log."""
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(listener, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(listener)
