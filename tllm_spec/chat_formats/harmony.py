"""Reads answers in OpenAI's Harmony format (text/harmony.py): reasoning, calls and the answer.

The parts are told apart by special tokens, not by their names, which a text may have. So the parser
reads a text in which each of them is a character that has no other meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set

from tllm_spec.chat_formats.marked_text import MarkedText
from tllm_spec.chat_formats.pieces import Arguments, CallStart, Piece, Reasoning, Text
from tllm_spec.text.tokenizer import Tokenizer
from tllm_spec.text.vocabulary import NAMES

# Noncharacters of Unicode.
MARKS: Mapping[str, str] = {name: chr(0xFDD8 + place) for place, name in enumerate(NAMES)}
START, _, MESSAGE, CHANNEL, CONSTRAIN, _, _ = MARKS.values()
_MARK = re.compile(f"([{''.join(MARKS.values())}])")
# Characters of a header, at most: more are content, as in an answer without any mark.
MAX_HEADER = 256
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
# Channel, recipient and type of content at the end of a header.
_AFTER_CHANNEL = re.compile(rf"\s*\w*(?:\s+to=\S*)?\s*(?:{CONSTRAIN}\s*\w*)?\s?")


def harmony_text(tokenizer: Tokenizer, tokens: Mapping[int, str]) -> MarkedText:
    """Reads a text with MARKS for `tokens`, which are names by id."""
    marks = {token: (MARKS[name], name) for token, name in tokens.items()}
    return MarkedText(tokenizer, marks)


class HarmonyParser:
    """Begins in the header of the assistant's message, as prompts end. `functions`: what may be
    called; calls of others than functions are reasoning. A message may have no channel, no end or
    no beginning."""

    def __init__(self, functions: Set[str]) -> None:
        self._functions = functions
        self._header = ""
        self._piece: Callable[[str], Piece] | None = None  # of content; None: in a header

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for part in _MARK.split(text):
            pieces += self._mark(part) if _MARK.match(part) else self._text(part)
        return pieces

    def finish(self) -> list[Piece]:
        return self._end()

    def _text(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        if self._piece is None:
            room = MAX_HEADER - len(self._header)
            self._header, text = self._header + text[:room], text[room:]
            if text:
                pieces = self._begin(self._rest())
        if self._piece is not None and text:
            pieces.append(self._piece(text))
        return pieces

    def _mark(self, mark: str) -> list[Piece]:
        if mark == MESSAGE:
            return self._begin("") if self._piece is None else []
        if mark == CONSTRAIN:
            self._header += mark if self._piece is None else ""
            return []
        if mark == CHANNEL and self._piece is None and CHANNEL not in self._header:
            self._header += mark
            return []
        pieces = self._end()
        self._header = mark if mark in (START, CHANNEL) else ""
        return pieces

    def _begin(self, content: str) -> list[Piece]:
        """The header is over. content: what is not of the header."""
        role, _, channel = self._header.lstrip(START).partition(CHANNEL)
        pieces: list[Piece] = []
        if (found := _RECIPIENT.search(channel) or _RECIPIENT.search(role)) is not None:
            name = found[1].removeprefix("functions.")
            if name in self._functions or (self._functions and name != found[1]):
                pieces, self._piece = [CallStart(name)], Arguments
            else:
                self._piece = Reasoning
        elif channel.strip().startswith("analysis") or self._is_of_others(role):
            self._piece = Reasoning
        else:
            self._piece = Text
        return [*pieces, self._piece(content)] if content else pieces

    def _end(self) -> list[Piece]:
        rest = self._rest() if self._piece is None else ""
        pieces = self._begin(rest) if rest else []
        self._header, self._piece = "", None
        return pieces

    def _is_of_others(self, role: str) -> bool:
        """Whether the message has another role than the assistant's."""
        return self._header.startswith(START) and not role.strip().startswith("assistant")

    def _rest(self) -> str:
        """What of the header is content, if no mark has ended it."""
        role, mark, channel = self._header.partition(CHANNEL)
        if mark:
            return _AFTER_CHANNEL.sub("", channel, count=1)
        return re.sub(r"\s*\S*\s?", "", role[1:], count=1) if role.startswith(START) else role
