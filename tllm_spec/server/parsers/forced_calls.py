"""Calls of a text that a grammar has forced to be them: `tool_choice` required or one function."""

from __future__ import annotations

from tllm_spec.server.parsers.json_call import JsonCall
from tllm_spec.server.parsers.pieces import Arguments, CallStart, Piece


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
