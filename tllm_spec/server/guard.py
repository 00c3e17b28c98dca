"""What every HTTP request passes before a route sees it: Host and key, the limits of a body, a
request id, and one line in the access log."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from time import monotonic
from typing import Any

from tllm_spec.server.body_encoding import BodyDecoder
from tllm_spec.server.callers import client_of_address
from tllm_spec.server.client_keys import ClientKeys
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.refusals import RequestRefused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

access_log = logging.getLogger("tllm_spec.access")

# Without a key: load balancers ask for the first, browsers for pages without data.
OPEN_PATHS = frozenset({"/health", "/dashboard"})
# Load balancers and Prometheus ask for them all the time, so their good answers are of no interest.
PROBED_PATHS = frozenset({"/health", "/metrics", "/prometheus/metrics"})
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
LARGE_BODY = 1 << 20  # bytes; only one such body is parsed and tokenised at a time
# A body's text is cheap, its values are not: a parsed one takes up to 200 bytes.
MAX_VALUES = 1 << 19
SEPARATORS = (b",", b":", b"[", b"{")
# Python stores a text that has one such character with two or four bytes for each of all its
# characters.
WIDE = re.compile(rb"[\xc4-\xff]|\\u")
WIDTH = 4
CLIENT_CLOSED_REQUEST = 499  # a status that no client receives
HTTP_VERSIONS = frozenset({"1.0", "1.1"})
URL = re.compile(r"https?://[^/]*", re.IGNORECASE)
CLOSES = {"Connection": "close"}


class _Disconnected(Exception):
    """The client has gone before its body was complete."""


class Guard:
    """ASGI middleware. In the scope's state it leaves

    - `take_body`, which returns the body, once; what the application receives only says whether
      there is one. So a long body is not kept while its text is parsed.
    - `body_size`, and `release_body`, which a route may call when it is done with the body.
    - `at_end`, a list of functions to call when the answer has been sent.
    - `client`: the name of the client's key, or its address where keys have no names.
    - `separate_cache`: whether clients are told apart by their keys.

    A route that generates leaves a function there as `tokens`, for the access log: it returns the
    tokens of prompts and of outputs."""

    def __init__(self, app: App, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._keys = ClientKeys(options.api_key)
        self._num_held = 0  # bytes of bodies that are being read, parsed or tokenised
        self._one_large = asyncio.Lock()

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, headers = monotonic(), dict(scope["headers"])
        scope["path"] = _plain_path(scope["path"])
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        address = (scope.get("client") or ("", 0))[0]
        state |= {"request_id": request_id, "client": client_of_address(address)}
        state["separate_cache"] = self._keys.are_several
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._guarded(scope, headers, receive, send_with_id)
        except (_Disconnected, asyncio.CancelledError):
            # Only the server cancels this task, when it shuts down; no caller waits for the result.
            status = CLIENT_CLOSED_REQUEST
        finally:
            _log_access(scope, status, monotonic() - start)
        return None

    async def _guarded(
        self, scope: Any, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        try:
            _check_form(scope)
            self._check_host(headers)
            if name := self._key_name(scope["path"], headers):
                scope["state"]["client"] = f"key {name}"
            if scope["method"] != "POST":
                return await self._app(scope, receive, send)
            body = await self._body(headers, receive)
        except RequestRefused as refusal:
            response = refusal.response()
            response.headers.update(CLOSES)
            return await response(scope, receive, send)
        size = len(body)
        bodies = [body]
        del body
        is_large = size > LARGE_BODY
        if is_large:
            await self._one_large.acquire()
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._num_held -= size
                if is_large:
                    gc.collect()  # cycles of exceptions and frames may hold what was parsed
                    self._one_large.release()

        at_end: list[Callable[[], None]] = [release]
        scope["state"] |= {"take_body": bodies.pop, "release_body": release}
        scope["state"] |= {"body_size": size, "at_end": at_end}
        try:
            return await self._app(scope, _replayed(b"-" if size else b"", receive), send)
        finally:
            for function in at_end:
                function()

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        hosts = self._options.hosts
        if hosts is None or b"host" not in headers:  # of HTTP/1.0, which no browser sends
            return
        given = headers.get(b"host", b"").decode("latin-1")
        name = re.sub(r":\d*$", "", given).strip("[]").lower()
        if name not in hosts:
            shown = given[:100]
            raise RequestRefused(
                403,
                f"Host {shown!r} is not served: without --allowed_hosts a server that listens on "
                f"localhost takes its own names only; start it with --allowed_hosts {name[:100]}",
            )

    def _key_name(self, path: str, headers: Mapping[bytes, bytes]) -> str:
        """The name of the request's key; "" where keys have no names, or none is needed."""
        if not self._keys or path in OPEN_PATHS:
            return ""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        name = self._keys.name_of(given.strip())
        if name is None or scheme.lower() != b"bearer":
            raise RequestRefused(
                401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )
        return name

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytearray:
        """The whole body. It counts as held until the caller is done with it."""
        try:
            return await asyncio.wait_for(
                self._read_body(headers, receive), self._options.body_timeout
            )
        except asyncio.TimeoutError:
            seconds = self._options.body_timeout
            raise RequestRefused(408, f"the body has not arrived within {seconds:g} s") from None

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytearray:
        if int(headers.get(b"content-length", b"0")) > self._options.max_body_bytes:
            raise self._too_large()
        decoder = BodyDecoder(headers)
        body = bytearray()
        more, is_taken, num_values, is_wide = True, False, 0, False
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise _Disconnected
                chunk, more = message.get("body", b""), message.get("more_body", False)
                for piece in decoder.pieces(chunk):
                    self._hold(body, piece)
                    # Each piece is counted as it comes, since counting the whole would take long.
                    num_values += sum(map(piece.count, SEPARATORS))
                    is_wide = is_wide or bool(WIDE.search(body, max(0, len(body) - len(piece) - 1)))
                    if len(piece) > len(chunk):  # a file is unpacked: others take their turn
                        await asyncio.sleep(0)
            decoder.check_end()
            self._check_parsed_size(len(body), num_values, is_wide=is_wide)
            is_taken = True
            return body
        finally:
            if not is_taken:
                self._num_held -= len(body)
                body.clear()  # a traceback of this frame would keep it

    def _hold(self, body: bytearray, piece: bytes) -> None:
        """Adds to a body. Raises RequestRefused if there is no room."""
        body += piece
        self._num_held += len(piece)
        limit = self._options.max_body_bytes
        if len(body) > limit:
            raise self._too_large()
        if self._num_held > limit:
            raise RequestRefused(503, "too many large bodies at once", "overloaded", retry_after=1)

    def _check_parsed_size(self, num_bytes: int, num_values: int, *, is_wide: bool) -> None:
        if num_values > MAX_VALUES:
            raise RequestRefused(
                413, f"the body has more than {MAX_VALUES} JSON values; send several bodies"
            )
        longest = self._options.max_body_bytes // WIDTH
        if num_bytes > longest and is_wide:
            raise RequestRefused(
                413,
                f"the body is too large: at most {longest} bytes are accepted of a text with "
                "characters that are not Latin; send several bodies",
            )

    def _too_large(self) -> RequestRefused:
        limit = self._options.max_body_bytes
        return RequestRefused(413, f"the body is too large: at most {limit} bytes are accepted")


def _check_form(scope: Any) -> None:
    """Raises RequestRefused for what h11 lets through."""
    if (version := scope["http_version"]) not in HTTP_VERSIONS:
        raise RequestRefused(505, f"HTTP/{version} is not served; HTTP/1.1 is")


def _plain_path(path: str) -> str:
    """The path of a route: a request through a proxy may have a whole URL as its target, and a
    slash at the end changes nothing."""
    if found := URL.match(path):
        path = path[found.end() :]
    return path.rstrip("/") or "/"


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what really arrives: the client's disconnect."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """The client's own, if it can stand in a header and in a log."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"


def _log_access(scope: Any, status: int, seconds: float) -> None:
    level = logging.DEBUG if status < 400 and scope["path"] in PROBED_PATHS else logging.INFO
    if not access_log.isEnabledFor(level):
        return
    host, port = scope.get("client") or ("?", 0)
    state = scope["state"]
    entry: dict[str, Any] = {
        "client": f"{host}:{port}",
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 4),
        "request_id": state["request_id"],
    }
    text = "%(client)s %(method)s %(path)r %(status)s in %(seconds).3f s"
    if tokens := state.get("tokens"):
        entry["prompt_tokens"], entry["output_tokens"] = tokens()
        text += ", %(prompt_tokens)d + %(output_tokens)d tokens"
    access_log.log(level, f"{text} [%(request_id)s]", entry, extra={"fields": entry})
