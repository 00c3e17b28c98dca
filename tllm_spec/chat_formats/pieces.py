"""What parsers make of a model's text, and what they share: how they wait for more of it, where a
marker may begin, and calls in JSON."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

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
T = TypeVar("T")
Steps = Generator[Piece | None, None, T]
"""Pieces, and None where more text is needed."""


def num_held(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a marker."""
    longest = min(max(map(len, markers)) - 1, len(text))
    for length in range(longest, 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class JsonEnd:
    """Finds the end of a JSON object or array that comes in pieces, `depth` of whose brackets are
    open."""

    opening, closing, quotes = "{[", "}]", '"'

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quote, self._escaped = depth, "", False

    def feed(self, text: str) -> int | None:
        """Characters of `text` that belong to the value, None while it goes on."""
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quote:
                self._escaped = character == "\\"
                self._quote = "" if character == self._quote else self._quote
            elif character in self.quotes:
                self._quote = character
            elif character in self.opening:
                self._depth += 1
            elif character in self.closing:
                self._depth -= 1
                if self._depth <= 0:
                    return position + 1
        return None


# The beginning of a call as JSON: `{"name": "f", "arguments": {...}}`, or with "parameters".
HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}))+")'
    r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
MAX_HEAD = 1024  # characters before the arguments of a call


class StepParser(ABC):
    """A parser that is one generator. text: what has come and is not read. has_ended: there is no
    more, so nothing may wait for it."""

    def __init__(self) -> None:
        self.text, self.has_ended = "", False
        self._steps = self.steps()

    @abstractmethod
    def steps(self) -> Steps[None]:
        """Reads the whole text."""

    def feed(self, text: str) -> list[Piece]:
        self.text += text
        new = iter(lambda: next(self._steps, None), None)
        return [piece for piece in new if piece.text or piece.kind == CALL]

    def finish(self) -> list[Piece]:
        self.has_ended = True
        return self.feed("")

    def taken(self, number: int | None = None) -> str:
        """The next characters, which are read now; None: all."""
        taken = self.text[:number]
        self.text = self.text[len(taken) :]
        return taken

    def rest(self, kind: str) -> Steps[None]:
        """Gives out everything that follows."""
        while not self.has_ended:
            yield Piece(kind, self.taken())
            yield None
        yield Piece(kind, self.taken())

    def skip(self, characters: str | None = None) -> Steps[None]:
        """Leaves out these characters, or white space, up to another one."""
        while not (left := self.text.lstrip(characters)) and not self.has_ended:
            yield None
        self.text = left

    def marker(self, marker: str, blank: str | None = None) -> Steps[bool]:
        """Whether the text begins with a marker, maybe after white space or what is named instead.
        Both are read then."""
        while marker.startswith(begun := self.text.lstrip(blank)) and begun != marker:
            if self.has_ended:
                return False
            yield None
        if is_there := begun.startswith(marker):
            self.text = begun.removeprefix(marker)
        return is_there

    def json(self, end: JsonEnd, *, is_shown: bool = True) -> Steps[None]:
        """Gives out arguments up to an end, or leaves them out."""
        while True:
            length = end.feed(self.text)
            new = self.taken(length)
            if is_shown:
                yield Arguments(new)
            if length is not None or self.has_ended:
                return
            yield None

    def json_call(self) -> Steps[str]:
        """Reads a call as a JSON object. The arguments are given out as they come if the name comes
        first. Returns the text of what is no call."""
        end, num_read = JsonEnd(), 0
        while (head := HEAD.match(self.text, 0, MAX_HEAD)) is None:
            length = end.feed(self.text[num_read:])
            if length is not None or self.has_ended:
                raw = self.taken(None if length is None else num_read + length)
                call = call_of(raw)
                yield from call or ()
                return "" if call else raw
            num_read = len(self.text)
            yield None
        yield CallStart(json.loads(head[1]))
        self.taken(head.end())
        yield from self.json(JsonEnd())
        yield from self.json(JsonEnd(depth=1), is_shown=False)
        return ""


def call_of(text: str) -> tuple[Piece, Piece] | None:
    """A whole call; None if it is not one."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write JSON in a string
        return whole_call(call["name"], arguments)
    if not isinstance(arguments, dict):
        return None
    return whole_call(call["name"], json.dumps(arguments, ensure_ascii=False))


def whole_call(name: str, arguments: str) -> tuple[Piece, Piece]:
    """A call with all its arguments. Half a surrogate pair, which escapes may write, is no text."""
    name, arguments = (each.encode(errors="replace").decode() for each in (name, arguments))
    return CallStart(name), Arguments(arguments)


class PlainText(StepParser):
    """A text without calls."""

    def steps(self) -> Steps[None]:
        return self.rest(CONTENT)


# Calls of a text that a grammar has forced to be them: `tool_choice` required or one function.


class ForcedCall(StepParser):
    """The whole text is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        super().__init__()

    def steps(self) -> Steps[None]:
        yield CallStart(self._name)
        yield from self.rest(ARGUMENTS)


class ForcedCalls(StepParser):
    """The text is a JSON list of `{"name": ..., "parameters": {...}}`."""

    def steps(self) -> Steps[None]:
        while not self.has_ended:
            self.taken(self.text.find("{") if "{" in self.text else None)
            if self.text:
                yield from self.json_call()
            else:
                yield None
