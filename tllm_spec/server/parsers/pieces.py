"""What parsers make of a model's text, and what they share: where a marker may begin, where a JSON
value ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Text:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the model for itself."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call of a function begins."""

    name: str


@dataclass(frozen=True)
class Arguments:
    """The next characters of the arguments of the latest call, which are JSON."""

    text: str


Piece = Text | Reasoning | CallStart | Arguments


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


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The pieces without empty ones, and with neighbours of the same kind joined."""
    found: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            found.append(piece)
        elif piece.text:
            last = found[-1] if found else None
            if last is not None and not isinstance(last, CallStart) and type(last) is type(piece):
                found[-1] = type(piece)(last.text + piece.text)
            else:
                found.append(piece)
    return found


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
