"""A small HTTP/1.1 client for benchmarks: sends JSON, gives each server-sent event with its time.

Over plain asyncio streams, so that the client costs little and times are those of arrival."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

MAX_LINE = 1 << 24  # bytes


class HttpError(Exception):
    """An answer with another status than 200."""


@dataclass(frozen=True)
class Target:
    """base_url: of the API, such as http://localhost:8000/v1. Raises ValueError for other URLs."""

    base_url: str
    api_key: str | None = None

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url = {self.base_url!r}: http://HOST:PORT/v1 is needed")

    @property
    def root(self) -> str:
        """Where `/metrics` is: the path without /v1."""
        return urlsplit(self.base_url).path.rstrip("/").removesuffix("/v1")

    @property
    def api(self) -> str:
        return urlsplit(self.base_url).path.rstrip("/")


async def get(target: Target, path: str) -> bytes:
    """The body of an answer. Raises HttpError, and OSError without a connection."""
    return b"".join([chunk async for chunk in _chunks(target, "GET", path, None)])


async def events(
    target: Target, path: str, body: dict[str, Any]
) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Yields `(time.perf_counter(), data)` of each event but the last, [DONE]. Raises as
    `get`."""
    buffer = b""
    async for chunk in _chunks(target, "POST", path, body):
        arrived = perf_counter()
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield arrived, json.loads(data)


async def _chunks(
    target: Target, method: str, path: str, body: dict[str, Any] | None
) -> AsyncIterator[bytes]:
    parts = urlsplit(target.base_url)
    is_tls = parts.scheme == "https"
    reader, writer = await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if is_tls else 80),
        ssl=ssl.create_default_context() if is_tls else None,
        limit=MAX_LINE,
    )
    try:
        writer.write(_head_and_body(target, parts.netloc, method, path, body))
        status, headers = await _answer_head(reader)
        if status != 200:
            content = b"".join([chunk async for chunk in _content(reader, headers)])
            raise HttpError(f"{status}: {content[:500].decode(errors='replace')}")
        async for chunk in _content(reader, headers):
            yield chunk
    finally:
        writer.close()


def _head_and_body(
    target: Target, host: str, method: str, path: str, body: dict[str, Any] | None
) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host.rpartition('@')[2]}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
    ]
    if target.api_key:
        lines.append(f"Authorization: Bearer {target.api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _answer_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the server closed the connection without an answer") from error
    first, *lines = head.decode("latin-1").split("\r\n")
    named = (line.partition(":") for line in lines if line)
    return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in named}


async def _content(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    """Raises ConnectionError if the connection ends too early."""
    try:
        if headers.get("transfer-encoding", "").lower() != "chunked":
            length = headers.get("content-length")
            yield await (reader.read() if length is None else reader.readexactly(int(length)))
            return
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the server closed the connection within an answer") from error
