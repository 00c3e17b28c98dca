"""Calls of Mistral: `[TOOL_CALLS]` and a JSON list of calls, or in newer models for each call its
name, `[ARGS]` and the arguments."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Sequence
from functools import partial

from tllm_spec.chat_formats.chat_format import (
    WHITESPACE,
    ChatFormat,
    Function,
    Part,
    arguments_part,
    json_call,
    sequence,
    text,
)
from tllm_spec.chat_formats.marked_calls import MAX_HEAD, MarkedCalls
from tllm_spec.chat_formats.pieces import Arguments, CallStart, JsonCall, JsonEnd, Piece

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
# Some write no marker before the arguments.
HEAD = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
MAY_BE_HEAD = re.compile(r"\s*[\w.:-]*\s*(?:\[[A-Z_]*(?:\][^\[{]*(?:\[[A-Z]*\]?\s*)?)?)?")
CALL_ID_CHARS = 9  # as its templates demand
LETTERS = string.ascii_letters + string.digits


class MistralCalls(MarkedCalls):
    """Nothing ends a call but the end of its JSON."""

    start, end = BEGIN, ""

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__()

    def _begin(self) -> None:
        self._is_list = False
        self._json: JsonCall | None = None  # of a list
        self._arguments: JsonEnd | None = None

    def _inside(self, text: str) -> tuple[list[Piece], str]:
        if self._arguments is not None:
            return self._in_arguments(text)
        if self._is_list or self._json is not None:
            return self._in_list(text)
        begun = text.lstrip()
        if begun[:1] in ("[", "{"):
            self._is_list = begun[0] == "["
            self._json = None if self._is_list else JsonCall()
            return self._in_list(begun[self._is_list :])
        if head := HEAD.match(text, 0, MAX_HEAD):
            self._arguments = JsonEnd()
            pieces, rest = self._in_arguments(text[head.end() :])
            return [CallStart(head[1]), *pieces], rest
        if len(text) < MAX_HEAD and MAY_BE_HEAD.fullmatch(text):
            return [], text
        self._in_call = self._after_call = False
        return self._shown(BEGIN), text

    def _in_arguments(self, text: str) -> tuple[list[Piece], str]:
        assert self._arguments is not None
        length = self._arguments.feed(text)
        if length is None:
            return [Arguments(text)], ""
        self._in_call, self._after_call, self._arguments = False, True, None
        return [Arguments(text[:length])], text[length:]

    def _in_list(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        while True:
            if self._json is None:
                text = text.lstrip(", \t\r\n")
                if text[:1] == "{":
                    self._json = JsonCall()
                else:
                    if text:
                        self._in_call, self._after_call = False, True
                    return pieces, text.removeprefix("]")
            new, text = self._json.feed(text)
            pieces += new
            if not self._json.is_done:
                return pieces, text
            if not self._json.has_started:
                self._after_call = False
                pieces += self._shown(self._json.raw)
            self._json = None
            if not self._is_list:
                self._in_call, self._after_call = False, True
                return pieces, text

    def _unfinished(self, text: str) -> list[Piece]:
        raw = "" if self._json is None or self._json.has_started else self._json.raw
        if self._is_list or self._arguments is not None or self._json is not None:
            return self._shown(raw)
        return self._shown(BEGIN + text)


def _call(function: Function) -> Part:
    return json_call(function.name, function.parameters, "arguments")


def _named_call(function: Function) -> Part:
    return sequence(text(function.name + ARGUMENTS), WHITESPACE, arguments_part(function))


def new_id() -> str:
    """The id of a call, as the templates accept it."""
    return "".join(secrets.choice(LETTERS) for _ in range(CALL_ID_CHARS))


_mistral = partial(ChatFormat, MistralCalls, tokens=(ARGUMENTS, ID), new_id=new_id)
MISTRAL = _mistral(_call, begin=BEGIN, list_begin="[", end="]", separator=",", template=(BEGIN,))
MISTRAL_NAMED = _mistral(_named_call, call_begin=BEGIN, template=(BEGIN, ARGUMENTS))
