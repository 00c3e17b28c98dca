"""JSON of answers: server-sent events, and large answers. The encoder in C holds Python's lock
until it is done, so a large answer is encoded in parts, between which other threads run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

# Server-sent events of JSON objects.


DONE = b"data: [DONE]\n\n"

# `json.dumps` would make one for each call.
encode = json.JSONEncoder(ensure_ascii=False).encode
encode_compact = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: %b\n\n" % encode(data).encode()


class TextEvent:
    """An event of which only the text MARK changes: the rest is encoded once."""

    MARK = "7d1a2b9e-the-text"

    def __init__(self, data: dict[str, Any]) -> None:
        self._head, self._tail = event(data).split(encode(self.MARK).encode())

    def with_text(self, text: str) -> bytes:
        """The event with a text instead of MARK."""
        return b"%b%b%b" % (self._head, encode(text).encode(), self._tail)


# JSON of large answers. The encoder in C holds Python's lock until it is done, so a large answer
# is encoded in parts, between which other threads run.


# Down to single tokens: answer, choices, choice, logprobs, content, token.
DEPTH = 5


def render(answer: dict[str, Any]) -> bytes:
    """As starlette's JSONResponse does."""
    return "".join(_parts(answer, DEPTH)).encode()


def large_event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: %b\n\n" % render(data)


def _parts(value: Any, depth: int) -> Iterator[str]:
    if not depth or not value or not isinstance(value, (dict, list)):
        yield encode_compact(value)
    elif isinstance(value, dict):
        for number, (name, each) in enumerate(value.items()):
            yield f"{',' if number else '{'}{encode_compact(name)}:"
            yield from _parts(each, depth - 1)
        yield "}"
    elif isinstance(value[0], (dict, list, type(None))):
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _parts(each, depth - 1)
        yield "]"
    else:
        yield encode_compact(value)
