"""Calls between markers in a text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tllm_spec.chat_formats.chat_format import Function
from tllm_spec.chat_formats.pieces import Arguments, CallStart, JsonEnd, Piece, Text, num_held

MAX_HEAD = 1024  # characters before the arguments of a call; more are not of a call


class MarkedCalls(ABC):
    """White space next to a call is left out, as are the `ignored` markers around all calls."""

    start: str
    end: str
    ignored: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._buffer = ""
        self._in_call = False
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            before = len(self._buffer), self._in_call
            pieces += self._call() if self._in_call else self._text()
            if (len(self._buffer), self._in_call) == before:
                return pieces

    def finish(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        if self._in_call:
            return self._unfinished(rest)
        return self._shown(rest)

    @abstractmethod
    def _begin(self) -> None:
        """A call begins."""

    @abstractmethod
    def _inside(self, text: str) -> tuple[list[Piece], str]:
        """Pieces of the call, and what is to be given again with what follows."""

    @abstractmethod
    def _unfinished(self, text: str) -> list[Piece]:
        """Pieces of a call without its end."""

    def _text(self) -> list[Piece]:
        markers = (self.start, *self.ignored)
        found = re.search("|".join(map(re.escape, markers)), self._buffer)
        if found is None:
            head = self._buffer[: len(self._buffer) - num_held(self._buffer, markers)].rstrip()
            self._buffer = self._buffer[len(head) :]
            return self._shown(head)
        head, self._buffer = self._buffer[: found.start()].rstrip(), self._buffer[found.end() :]
        shown = self._shown(head)
        self._after_call = True
        if found[0] == self.start:
            self._in_call = True
            self._begin()
        return shown

    def _shown(self, text: str) -> list[Piece]:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return [Text(text)] if text else []

    def _call(self) -> list[Piece]:
        pieces, self._buffer = self._inside(self._buffer)
        return pieces


class JsonCalls(MarkedCalls):
    """Each call has its arguments as a JSON object after a `head`, which has the name."""

    head: re.Pattern[str]  # up to the arguments' first brace

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self._functions = functions

    def _begin(self) -> None:
        self._arguments: JsonEnd | None = None
        self._has_started = False

    def _named(self, head: re.Match[str], arguments: str) -> list[Piece] | None:
        """How the call begins; None if it is none. arguments: if they are needed for that."""
        return [CallStart(head[1].strip())]

    def _needs_arguments(self, head: re.Match[str]) -> bool:
        """Whether the arguments say which function is called."""
        return False

    def _inside(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if not self._has_started:
            begun = self._begun(text)
            if begun is None:
                return self._without_arguments(text)
            pieces, text = begun
            self._has_started, self._arguments = True, JsonEnd()
        if self._arguments is not None:
            length = self._arguments.feed(text)
            new, text = (text, "") if length is None else (text[:length], text[length:])
            pieces.append(Arguments(new))
            if length is None:
                return pieces, ""
            self._arguments = None
        _, marker, rest = text.partition(self.end)
        if not marker:
            return pieces, text
        self._in_call, self._after_call = False, True
        return pieces, rest

    def _begun(self, text: str) -> tuple[list[Piece], str] | None:
        """The beginning of a call and its arguments; None if it is not known, or there is none."""
        head = self.head.match(text, 0, MAX_HEAD)
        if head is None or self.end in head[0]:
            return None
        arguments = text[head.end() :]
        if self._needs_arguments(head) and self.end not in arguments:
            return None
        pieces = self._named(head, arguments.partition(self.end)[0])
        return None if pieces is None else (pieces, arguments)

    def _without_arguments(self, text: str) -> tuple[list[Piece], str]:
        content, marker, rest = text.partition(self.end)
        if not marker:
            return [], text
        self._in_call = False
        pieces = self._shown(f"{self.start}{content}{self.end}")
        self._after_call = True
        return pieces, rest

    def _unfinished(self, text: str) -> list[Piece]:
        return [] if self._has_started else self._shown(f"{self.start}{text}")
