"""What parsers make of a model's text, and what they share: where a marker may begin, where a JSON
value ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning_content", "call", "arguments"
CALL_ID = "call_id"


class Piece(NamedTuple):
    """The next characters of the answer, of the model's reasoning, or of the arguments of the
    latest call, which are JSON. CALL: a call of the function `text` begins. CALL_ID: the model's
    own id of the call that begins next."""

    kind: str
    text: str


Text = partial(Piece, CONTENT)
Reasoning = partial(Piece, REASONING)
CallStart = partial(Piece, CALL)
Arguments = partial(Piece, ARGUMENTS)


class Parser(Protocol):
    """Splits a growing text into pieces. However the text is split into `feed` calls, the pieces
    are the same once neighbours of the same kind are joined."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain after `text`."""
        ...

    def finish(self) -> list[Piece]:
        """The rest, when the text has ended."""
        ...


NewParser = Callable[[], Parser]


def num_held(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = min(max(map(len, markers)) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class JsonEnd:
    """Finds the end of a JSON object or array that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """Characters of `text` that belong to the value, None while it goes on."""
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


# Reads one call as JSON: `{"name": "f", "arguments": {...}}`, or with "parameters".


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


# Calls of a text that a grammar has forced to be them: `tool_choice` required or one function.


class ForcedCall:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._pieces: list[Piece] = [CallStart(name)]

    def feed(self, text: str) -> list[Piece]:
        pieces, self._pieces = [*self._pieces, Arguments(text)], []
        return pieces

    def finish(self) -> list[Piece]:
        return self._pieces


class ForcedCalls:
    """The text is a JSON list of `{"name": ..., "parameters": {...}}`."""

    def __init__(self) -> None:
        self._call: JsonCall | None = None

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is None:
                text = text[text.find("{") :] if "{" in text else ""
                if not text:
                    break
                self._call = JsonCall()
            new, text = self._call.feed(text)
            pieces += new
            if self._call.is_done:
                self._call = None
        return pieces

    def finish(self) -> list[Piece]:
        return []
