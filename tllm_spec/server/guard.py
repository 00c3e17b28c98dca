"""What every HTTP request passes before a route sees it: Host and key, a request id, and a line in
the access log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from hashlib import sha256
from ipaddress import IPv4Address, ip_address, ip_network
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import Request

from tllm_spec.config.option_checks import shown
from tllm_spec.server.bodies import Bodies, Disconnected, Message, Receive
from tllm_spec.server.options import ClientKeys, ServerOptions
from tllm_spec.server.refusals import RequestRefused

MAX_NAME = 64  # characters of a user's name that are kept as they are


def kept_name(user: str) -> str:
    return user if len(user) <= MAX_NAME else digest(user)


def client_of_address(address: str) -> str:
    """One client for all addresses that its host may take: of IPv6 the network of 64 bits."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address  # of a proxy that names no address
    if isinstance(found, IPv4Address) or found.ipv4_mapped is not None:
        return str(getattr(found, "ipv4_mapped", None) or found)
    return str(ip_network((found, 64), strict=False))


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

access_log = logging.getLogger("tllm_spec.access")

# Without a key: load balancers ask for the first, browsers for pages without data.
OPEN_PATHS = frozenset({"/health", "/dashboard"})
# Load balancers and Prometheus ask for them all the time, so their good answers are of no interest.
PROBED_PATHS = frozenset({"/health", "/metrics", "/prometheus/metrics"})
REQUEST_ID = re.compile(rb"[\w.:-]{1,128}")
CLIENT_CLOSED_REQUEST = 499  # a status that no client receives
HTTP_VERSIONS = frozenset({"1.0", "1.1"})
URL = re.compile(r"https?://[^/]*", re.IGNORECASE)


class Guard:
    """ASGI middleware. In the scope's state it leaves

    - `read_body`, which reads the body as `Bodies.read` says; only routes that take one call it.
    - `at_end`, a list of functions to call when the answer has been sent.
    - `client`: the name of the client's key, or its address where keys have no names.
    - `separate_cache`: whether clients are told apart by their keys.

    A route that generates leaves a function there as `tokens`, for the access log: it returns the
    tokens of prompts and of outputs."""

    def __init__(self, app: App, options: ServerOptions) -> None:
        self._app = app
        self._options = options
        self._keys = ClientKeys(options.api_key)
        self._bodies = Bodies(options)

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        start, headers = monotonic(), dict(scope["headers"])
        scope["path"] = _plain_path(scope["path"])
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        address = (scope.get("client") or ("", 0))[0]
        state |= {"request_id": request_id, "client": client_of_address(address)}
        state |= {"separate_cache": self._keys.are_several, "at_end": []}
        state["read_body"] = partial(self._bodies.read, state, headers, receive)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
                # Or a client that reads no answer would keep what others wait for.
                if release_body := state.get("release_body"):
                    release_body()
            await send(message)

        try:
            await self._guarded(scope, headers, receive, send_with_id)
        except (Disconnected, asyncio.CancelledError):
            # Only the server cancels this task, when it shuts down; no caller waits for the result.
            status = CLIENT_CLOSED_REQUEST
        finally:
            for function in state["at_end"]:
                function()
            _log_access(scope, status, monotonic() - start)
        return None

    async def _guarded(
        self, scope: Any, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        try:
            if (version := scope["http_version"]) not in HTTP_VERSIONS:  # h11 lets others through
                message = f"HTTP/{version} is not served; HTTP/1.1 is"
                raise RequestRefused(505, message, "invalid_request_error")
            self._check_host(headers)
            if name := self._key_name(scope["path"], headers):
                scope["state"]["client"] = f"key {name}"
        except RequestRefused as refusal:
            return await refusal.response(scope["path"])(scope, receive, send)
        return await self._app(scope, receive, send)

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
        tokens = [given] if scheme.lower() == b"bearer" else []
        for key in (*tokens, headers.get(b"x-api-key", b"")):  # the second is Anthropic's
            if (name := self._keys.name_of(key.strip())) is not None:
                return name
        message = "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY"
        raise RequestRefused(401, message, code="invalid_api_key")


def _plain_path(path: str) -> str:
    """The path of a route: a request through a proxy may have a whole URL as its target, and a
    slash at the end changes nothing."""
    if found := URL.match(path):
        path = path[found.end() :]
    return path.rstrip("/") or "/"


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
    if adapter := state.get("adapter"):
        entry["adapter"] = adapter
        text += ", adapter %(adapter)s"
    if tokens := state.get("tokens"):
        entry["prompt_tokens"], entry["output_tokens"] = tokens()
        text += ", %(prompt_tokens)d + %(output_tokens)d tokens"
    access_log.log(level, f"{text} [%(request_id)s]", entry, extra={"fields": entry})


# What an operator's request passes.


def check_key(request: Request, name: str | None, what: str) -> None:
    """name: of the only key that may do it."""
    if name is None or request.scope["state"]["client"] != f"key {name}":
        raise RequestRefused(403, f"this key may not {what}")


def folder_below(root: Path, name: str, key: str, option: str) -> Path:
    """Symbolic links are followed before it is compared with the root. Raises ValueError."""
    try:
        folder = (root / name).resolve()
        is_below = root.resolve() in folder.parents and folder.is_dir()
    except (OSError, ValueError, RuntimeError):  # a long name, one that is no text, links in a loop
        is_below = False
    if not is_below:
        raise ValueError(f"{key} = {shown(name)} is not a folder below {option}")
    return folder
