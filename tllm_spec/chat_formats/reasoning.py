"""Separates a model's reasoning from its answer."""

from __future__ import annotations

import re

from tllm_spec.chat_formats.pieces import Parser, Piece, Reasoning, Text, num_held
from tllm_spec.text.reasoning import ReasoningFormat, Section


class ReasoningParser:
    """section: how the text begins. An empty section may come before the real one. The answer goes
    through `answer`."""

    def __init__(self, answer: Parser, form: ReasoningFormat, section: Section) -> None:
        self._answer, self._form = answer, form
        self._ends = (form.closer, *form.ends_at)
        self._end = re.compile("|".join(map(re.escape, self._ends)))
        self._starts_inside = section == "inside"
        # None: reasoning or the answer begins with what follows.
        self._is_reasoning: bool | None = False if section == "over" else None
        self._is_first = True  # of reasoning or answer: white space is left out
        self._buffer = ""

    def feed(self, text: str) -> list[Piece]:
        if self._is_reasoning is False:
            return self._feed_answer(text)
        self._buffer += text
        pieces: list[Piece] = []
        while True:
            if self._is_reasoning is None and not self._begin():
                return pieces
            if not self._is_reasoning:
                return pieces + self._feed_answer(self._taken(len(self._buffer)))
            found = self._end.search(self._buffer)
            if found is None:
                held = num_held(self._buffer, self._ends)
                head = self._buffer[: len(self._buffer) - held]
                return pieces + self._reasoned(self._taken(len(head.rstrip())))
            pieces += self._reasoned(self._taken(found.start()).rstrip())
            if found[0] == self._form.closer:
                self._taken(len(found[0]))
            # After an empty section another one may begin.
            self._is_reasoning = None if self._is_first else False
            self._is_first, self._starts_inside = True, False

    def finish(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        if self._is_reasoning or (self._is_reasoning is None and self._starts_inside):
            return self._reasoned(rest)
        return [*self._feed_answer(rest), *self._answer.finish()]

    def _begin(self) -> bool:
        """Whether it is known how the text goes on."""
        begun = self._buffer.lstrip()
        if begun.startswith(self._form.opener):
            self._is_reasoning, self._buffer = True, begun[len(self._form.opener) :]
        elif self._form.opener.startswith(begun):
            return False
        else:
            self._is_reasoning = self._starts_inside
        return True

    def _taken(self, number: int) -> str:
        taken, self._buffer = self._buffer[:number], self._buffer[number:]
        return taken

    def _reasoned(self, text: str) -> list[Piece]:
        text = self._without_first_space(text)
        return [Reasoning(text)] if text else []

    def _feed_answer(self, text: str) -> list[Piece]:
        text = self._without_first_space(text)
        return self._answer.feed(text) if text else []

    def _without_first_space(self, text: str) -> str:
        if self._is_first:
            text = text.lstrip()
            self._is_first = not text
        return text


class PlainText:
    """A text without calls."""

    def feed(self, text: str) -> list[Piece]:
        return [Text(text)] if text else []

    def finish(self) -> list[Piece]:
        return []
