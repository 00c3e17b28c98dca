"""Calls between markers in a text: Hermes' and Qwen's `<tool_call>`, DeepSeek's tokens."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod

from tllm_spec.chat_formats.pieces import (
    Arguments,
    CallStart,
    JsonCall,
    JsonEnd,
    Piece,
    Text,
    num_held,
)

# DeepSeek's text before the arguments of a call. A longer one is not a call.
HEAD = re.compile(r"(.*?)<｜tool▁sep｜>([^{]*)\{", re.DOTALL)
MAX_HEAD = 1024


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


class HermesCalls(MarkedCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    start, end = "<tool_call>", "</tool_call>"

    def _begin(self) -> None:
        self._json = JsonCall()

    def _inside(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if not self._json.is_done:
            pieces, text = self._json.feed(text)
            if not self._json.is_done:
                return pieces, text
        _, marker, rest = text.partition(self.end)
        if not marker:
            return pieces, text
        self._in_call = False
        if not self._json.has_started:  # what is not a call is text
            pieces += self._shown(f"{self.start}{self._json.raw}{self.end}")
        self._after_call = True
        return pieces, rest

    def _unfinished(self, text: str) -> list[Piece]:
        if self._json.has_started:
            return []
        return self._shown(f"{self.start}{self._json.raw}{text}")


class DeepSeekCalls(MarkedCalls):
    """V3 and R1: `function<sep>NAME`, a line with ```json, the arguments, ```. V3.1:
    `NAME<sep>ARGUMENTS`. Both between the same markers."""

    start, end = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
    ignored = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")

    def _begin(self) -> None:
        self._arguments: JsonEnd | None = None
        self._is_done = self._has_started = False

    def _inside(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if not self._has_started:
            head = HEAD.match(text, 0, MAX_HEAD)
            if head is None or self.end in head[0]:
                return self._without_arguments(text)
            text = text[head.end() - 1 :]
            self._has_started, self._arguments = True, JsonEnd()
            pieces.append(CallStart(_name(head[1], head[2])))
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


def _name(before: str, after: str) -> str:
    """The name from the texts around the separator. V3 writes the kind of tool before it."""
    return after.split("\n")[0].strip() if after.strip() else before.strip()
