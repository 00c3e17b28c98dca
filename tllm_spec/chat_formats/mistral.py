"""Calls of Mistral: `[TOOL_CALLS]` and a JSON list of calls, or in newer models for each call its
name, `[ARGS]` and the arguments."""

from __future__ import annotations

import re
import secrets
from functools import partial

from tllm_spec.chat_formats.chat_format import ChatFormat, json_call, named_call
from tllm_spec.chat_formats.marked_calls import MarkedCalls
from tllm_spec.chat_formats.pieces import MAX_HEAD, CallStart, JsonEnd, Steps

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
LIST = re.compile(r"\s*\[\s*(?=[{\]])")
# Some write no marker before the arguments.
HEAD = re.compile(r"\s*([\w.:-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
MAY_BE_HEAD = re.compile(r"\s*[\w.:-]*\s*(?:\[[A-Z_]*(?:\][^\[{]*(?:\[[A-Z]*\]?\s*)?)?)?")
MAY_BE_LIST = re.compile(r"\s*\[\s*")
CALL_ID_CHARS = 9  # as its templates demand


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


def new_id() -> str:
    """The id of a call, as the templates accept it."""
    return secrets.token_hex(CALL_ID_CHARS)[:CALL_ID_CHARS]


_named = partial(named_call, separator=ARGUMENTS)
_mistral = partial(ChatFormat, MistralCalls, tokens=(ARGUMENTS, ID), new_id=new_id)
MISTRAL_NAMED = _mistral(_named, call_begin=BEGIN, template=(BEGIN, ARGUMENTS))
MISTRAL = _mistral(
    json_call, begin=BEGIN, list_begin="[", end="]", separator=",", template=(BEGIN,)
)
