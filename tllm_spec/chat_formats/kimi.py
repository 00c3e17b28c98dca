"""Calls of Kimi K2: the model writes the id of a call, which has the function's name."""

from __future__ import annotations

import json
import re

from tllm_spec.chat_formats.chat_format import (
    WHITESPACE,
    ChatFormat,
    Function,
    Part,
    arguments_part,
    sequence,
    text,
)
from tllm_spec.chat_formats.marked_calls import JsonCalls
from tllm_spec.chat_formats.pieces import CALL_ID, CallStart, Piece
from tllm_spec.chat_formats.schema_values import properties_of

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
ID = re.compile(
    r"(?:functions\.)?(?::?(?P<alone>\d+)|(?P<name>.*?)(?::(?P<number>\d+))?)", re.DOTALL
)


class KimiCalls(JsonCalls):
    """An id may be a counter alone. Then the function is the one that has such arguments."""

    start, end, ignored = BEGIN, END, (SECTION, SECTION_END)
    head = re.compile(rf"\s*(.*?)\s*{re.escape(ARGUMENTS)}\s*(?=\{{)", re.DOTALL)

    def _needs_arguments(self, head: re.Match[str]) -> bool:
        return not _id_of(head)["name"]

    def _named(self, head: re.Match[str], arguments: str) -> list[Piece] | None:
        given = _id_of(head)
        name, number = given["name"], given["number"] or given["alone"]
        if not name:
            fitting = [each.name for each in self._functions if _fits(each, arguments)]
            if not fitting:
                return None
            name = fitting[0]
        own = [] if number is None else [Piece(CALL_ID, f"functions.{name}:{number}")]
        return [*own, CallStart(name)]


def _id_of(head: re.Match[str]) -> re.Match[str]:
    found = ID.fullmatch(head[1])
    assert found is not None
    return found


def _fits(function: Function, arguments: str) -> bool:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    members = properties_of(function.parameters, function.parameters)
    needed = {name for name, (_, is_needed) in members.items() if is_needed}
    return bool(needed <= given.keys() <= members.keys())


def _call(function: Function) -> Part:
    number: Part = {"type": "regex", "pattern": "[0-9]{1,4}"}
    return sequence(
        text(f"functions.{function.name}:"),
        number,
        text(ARGUMENTS),
        WHITESPACE,
        arguments_part(function),
    )


KIMI = ChatFormat(
    KimiCalls, _call, BEGIN, END, SECTION, SECTION_END, tokens=(ARGUMENTS,), template=(SECTION,)
)
