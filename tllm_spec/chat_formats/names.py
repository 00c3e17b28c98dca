"""Separates a model's reasoning, between <think> and </think>, from its answer, and names the
parsers of both."""

from __future__ import annotations

from collections.abc import Mapping

from tllm_spec.chat_formats.llama import LlamaJsonCalls, PythonicCalls
from tllm_spec.chat_formats.marked_calls import DeepSeekCalls, HermesCalls
from tllm_spec.chat_formats.pieces import NewParser, Parser, Piece, Reasoning, Text, num_held

# Separates a model's reasoning, between <think> and </think>, from its answer.


START, END = "<think>", "</think>"


class ReasoningParser:
    """starts_inside: the text begins as reasoning, also without <think>, which the chat template
    has written. The answer goes through `answer`."""

    def __init__(self, answer: Parser, *, starts_inside: bool) -> None:
        self._answer = answer
        self._starts_inside = starts_inside
        self._is_reasoning: bool | None = None  # None: the text has not begun
        self._is_first = True  # of reasoning or answer: white space is left out
        self._buffer = ""

    def feed(self, text: str) -> list[Piece]:
        if self._is_reasoning is False:
            return self._feed_answer(text)
        self._buffer += text
        if self._is_reasoning is None and not self._begin():
            return []
        if not self._is_reasoning:
            return self._feed_answer(self._taken(len(self._buffer)))
        reasoning, marker, rest = self._buffer.partition(END)
        if marker:
            self._buffer, self._is_reasoning = "", False
            pieces = self._reasoned(reasoning.rstrip())
            self._is_first = True
            return pieces + self._feed_answer(rest)
        num_kept = num_held(self._buffer, (END,))
        head = self._buffer[: len(self._buffer) - num_kept]
        return self._reasoned(self._taken(len(head.rstrip())))

    def finish(self) -> list[Piece]:
        rest, self._buffer = self._buffer, ""
        if self._is_reasoning or (self._is_reasoning is None and self._starts_inside):
            return [*self._reasoned(rest), *self._answer.finish()]
        return [*self._feed_answer(rest), *self._answer.finish()]

    def _begin(self) -> bool:
        """Whether it is known how the text begins."""
        begun = self._buffer.lstrip()
        if begun.startswith(START):
            self._is_reasoning, self._buffer = True, begun[len(START) :]
        elif START.startswith(begun):
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


# By the name of `--reasoning_parser`: whether the text begins as reasoning.
STARTS_INSIDE: Mapping[str, bool] = {"deepseek_r1": True, "qwen3": False}


def with_reasoning(name: str | None, answer: NewParser) -> NewParser:
    """A parser that passes what is not reasoning on to `answer`."""
    if name is None:
        return answer
    starts_inside = STARTS_INSIDE[name]
    return lambda: ReasoningParser(answer(), starts_inside=starts_inside)


# The names of `--tool_call_parser`, as in vLLM and TensorRT-LLM.


TOOL_PARSERS: Mapping[str, NewParser] = {
    "hermes": HermesCalls,
    "qwen3": HermesCalls,
    "llama3_json": LlamaJsonCalls,
    "llama4_json": LlamaJsonCalls,
    "pythonic": PythonicCalls,
    "llama4_pythonic": PythonicCalls,
    "deepseek_v3": DeepSeekCalls,
    "deepseek_v31": DeepSeekCalls,
}
