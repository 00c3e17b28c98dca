"""Server-sent events of JSON objects."""

from __future__ import annotations

import json
from typing import Any

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
