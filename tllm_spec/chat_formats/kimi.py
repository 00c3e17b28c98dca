"""Calls of Kimi K2: the model writes the id of a call, which has the function's name."""

from __future__ import annotations

import json
import re

from tllm_spec.chat_formats.chat_format import ChatFormat, Function, Part, arguments, sequence, text
from tllm_spec.chat_formats.marked_calls import MarkedCalls
from tllm_spec.chat_formats.pieces import CALL_ID, Piece, Steps
from tllm_spec.chat_formats.schema_values import properties_of

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
HEAD = re.compile(rf"\s*(.*?)\s*{re.escape(ARGUMENTS)}\s*(?=\{{)", re.DOTALL)
ID = re.compile(
    r"(?:functions\.)?(?::?(?P<alone>\d+)|(?P<name>.*?)(?::(?P<number>\d+))?)", re.DOTALL
)


class KimiCalls(MarkedCalls):
    """An id may be a counter alone. Then the function is the one that has such arguments."""

    start, end, ignored = BEGIN, END, (SECTION, SECTION_END)

    def call(self) -> Steps[None]:
        if (head := (yield from self.head(HEAD))) is None:
            return
        given = ID.fullmatch(head[1])
        assert given is not None
        name, number = given["name"] or (yield from self._fitting()), given["number"]
        if not name:
            yield self.shown(self.start + head[0])
            return
        if number := number or given["alone"]:
            yield Piece(CALL_ID, f"functions.{name}:{number}")
        yield from self.json_arguments(name)

    def _fitting(self) -> Steps[str | None]:
        while self.end not in self.text and not self.has_ended:
            yield None
        written = self.text.partition(self.end)[0]
        return next((each.name for each in self.functions if _fits(each, written)), None)


def _fits(function: Function, written: str) -> bool:
    try:
        given = json.loads(written)
    except (ValueError, RecursionError):
        return False
    members = properties_of(function.parameters, function.parameters)
    needed = {name for name, (_, is_needed) in members.items() if is_needed}
    return bool(needed <= given.keys() <= members.keys())


def _call(function: Function) -> Part:
    number: Part = {"type": "regex", "pattern": "[0-9]{1,4}"}
    head = sequence(text(f"functions.{function.name}:"), number, text(ARGUMENTS))
    return sequence(head, arguments(function))


KIMI = ChatFormat(
    KimiCalls, _call, BEGIN, END, SECTION, SECTION_END, tokens=(ARGUMENTS,), template=(SECTION,)
)
