"""Reads one call as JSON: `{"name": "f", "arguments": {...}}`, or with "parameters"."""

from __future__ import annotations

import json
import re

from tllm_spec.server.parsers.pieces import Arguments, CallStart, JsonEnd, Piece

# A string without control characters, which JSON does not allow; then the arguments begin.
HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
# How much of HEAD may come before its first closing quote is seen. More is read as a whole.
MAX_HEAD = 1024


class JsonCall:
    """The arguments are given out as they come if the name comes first. Otherwise the call is read
    as a whole, at its end."""

    def __init__(self) -> None:
        self.raw = ""  # what was fed and has not become a piece
        self.is_done = False
        self.has_started = False
        self._end = JsonEnd()
        self._arguments: JsonEnd | None = None

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """Pieces, and the text after the call, once `is_done`. A call that is not valid leaves its
        text in `raw`."""
        length = self._end.feed(text)
        mine, rest = (text, "") if length is None else (text[:length], text[length:])
        self.raw += mine
        self.is_done = length is not None
        pieces: list[Piece] = []
        if not self.has_started and (head := HEAD.match(self.raw, 0, MAX_HEAD)):
            value = self.raw[head.end() :]
            name = _name(head[1])
            if value.startswith("{") and name:
                self.has_started, self._arguments, self.raw = True, JsonEnd(), value
                pieces.append(CallStart(name))
        if self.has_started:
            pieces += self._new_arguments()
        elif self.is_done:
            pieces += self._whole()
        return pieces, rest

    def _new_arguments(self) -> list[Piece]:
        if self._arguments is None:
            self.raw = ""  # closing braces
            return []
        length = self._arguments.feed(self.raw)
        new, self.raw = self.raw if length is None else self.raw[:length], ""
        if length is not None:
            self._arguments = None
        return [Arguments(new)] if new else []

    def _whole(self) -> list[Piece]:
        call = call_of(self.raw)
        if call is None:
            return []
        self.raw, self.has_started = "", True
        return [CallStart(call[0]), Arguments(call[1])]


def call_of(text: str) -> tuple[str, str] | None:
    """Name and arguments of a whole call; None if it is not one."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON in a string
        return call["name"], arguments
    if not isinstance(arguments, dict):
        return None
    return call["name"], json.dumps(arguments, ensure_ascii=False)


def _name(literal: str) -> str | None:
    try:
        return str(json.loads(literal))
    except ValueError:
        return None
