"""JSON of large answers. The encoder in C holds Python's lock until it is done, so a large answer
is encoded in parts, between which other threads run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tllm_spec.server.events import encode_compact

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
