"""Calls of Mistral: `[TOOL_CALLS]` and a JSON list of calls, or in newer models for each call its
name, `[ARGS]` and the arguments."""

from __future__ import annotations

import re
import secrets
import string
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
from tllm_spec.chat_formats.marked_calls import MarkedCalls
from tllm_spec.chat_formats.pieces import MAX_HEAD, CallStart, JsonEnd, Steps

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
LIST = re.compile(r"\s*\[\s*(?=[{\]])")
# Some write no marker before the arguments.
HEAD = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
MAY_BE_HEAD = re.compile(r"\s*[\w.:-]*\s*(?:\[[A-Z_]*(?:\][^\[{]*(?:\[[A-Z]*\]?\s*)?)?)?")
MAY_BE_LIST = re.compile(r"\s*\[\s*")
CALL_ID_CHARS = 9  # as its templates demand
LETTERS = string.ascii_letters + string.digits


class MistralCalls(MarkedCalls):
    """Nothing ends a call but the end of its JSON."""

    start, end = BEGIN, ""

    def call(self) -> Steps[None]:
        while self._is_open() and not self.has_ended:
            yield None
        if head := HEAD.match(self.text, 0, MAX_HEAD):
            self.taken(head.end())
            yield CallStart(head[1])
            yield from self.json(JsonEnd())
        elif begin := LIST.match(self.text):
            self.taken(begin.end())
            while self.text.startswith("{"):
                yield self.shown((yield from self.json_call()))
                yield from self.skip(", \t\r\n")
            self.text = self.text.removeprefix("]")
        elif self.text.lstrip().startswith("{"):
            yield self.shown((yield from self.json_call()))
        else:
            yield self.shown(BEGIN)

    def _is_open(self) -> bool:
        """Whether it is not known how the call begins."""
        could_be = MAY_BE_HEAD.fullmatch(self.text) or MAY_BE_LIST.fullmatch(self.text)
        return could_be is not None and len(self.text) < MAX_HEAD


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
