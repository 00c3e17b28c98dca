"""Calls of Gemma 4, with values in a syntax of its own: keys have no quotes, strings have tokens
around them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from math import isfinite
from typing import Any

from tllm_spec.chat_formats.chat_format import (
    ChatFormat,
    Function,
    Part,
    Schema,
    either,
    json_part,
    members,
    optional,
    sequence,
    text,
)
from tllm_spec.chat_formats.marked_calls import MAX_HEAD, MarkedCalls
from tllm_spec.chat_formats.pieces import Arguments, CallStart, Piece, num_held
from tllm_spec.chat_formats.schema_values import (
    NUMBER,
    alone,
    properties_of,
    resolved,
    string_choices,
    types_of,
)

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
HEAD = re.compile(r"\s*call:([^\s{}]+)\s*(?=\{)")
PARTS = re.compile(rf"({re.escape(QUOTE)}|[{{}}\[\],:])")
MAX_DIGITS = 1000  # of an integer
MAX_DEPTH = 64  # of a value that is read
# Of values in a grammar, each one of whose type the schema says nothing counting three times.
# Deeper ones are texts and numbers.
MAX_FORCED_DEPTH = 6
UNTYPED = 3


class GemmaCalls(MarkedCalls):
    """The arguments are given out at the end of a call."""

    start, end = BEGIN, END

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__()

    def _begin(self) -> None:
        self._has_started = False

    def _inside(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if not self._has_started and (head := HEAD.match(text, 0, MAX_HEAD)):
            self._has_started = True
            pieces, text = [CallStart(head[1])], text[head.end() :]
        found = _end(text) if self._has_started else text.find(END)
        if found < 0:
            return pieces, text
        content, rest = text[:found], text[found + len(END) :]
        self._in_call = False
        if self._has_started:
            pieces.append(_arguments(content))
        else:
            pieces = self._shown(f"{BEGIN}{content}{END}")
        self._after_call = True
        return pieces, rest

    def _unfinished(self, text: str) -> list[Piece]:
        if self._has_started:
            return [_arguments(text[: len(text) - num_held(text, (END, QUOTE))])]
        return self._shown(BEGIN + text)


def _end(text: str) -> int:
    """Where END is that is in no string; -1 if it is not there."""
    position = text.find(END)
    while position >= 0 and text.count(QUOTE, 0, position) % 2:
        position = text.find(END, position + 1)
    return position


def _arguments(written: str) -> Piece:
    value = _Reader(written).value(0)
    return Arguments(json.dumps(value if isinstance(value, dict) else {}, ensure_ascii=False))


class _Reader:
    """Reads a value as far as it goes: what is open at the end of the text ends there."""

    def __init__(self, written: str) -> None:
        self._parts = [each for each in PARTS.split(written) if each]
        self._place = 0

    def _next(self) -> str:
        return self._parts[self._place] if self._place < len(self._parts) else ""

    def _take(self) -> str:
        part = self._next()
        self._place += 1
        return part

    def value(self, depth: int) -> Any:
        """The value that begins here."""
        self._skip_blank()
        first = self._next()
        if first == QUOTE:
            return self._string()
        if first in ("{", "[") and depth < MAX_DEPTH:
            self._place += 1
            return self._object(depth) if first == "{" else self._list(depth)
        return _plain(self._up_to(",", "}", "]"))

    def _skip_blank(self) -> None:
        while self._next() and not self._next().strip():
            self._place += 1

    def _string(self) -> str:
        self._place += 1
        found = self._up_to(QUOTE)
        self._place += 1
        return found

    def _up_to(self, *ends: str) -> str:
        begin = self._place
        while self._next() and self._next() not in ends:
            self._place += 1
        return "".join(self._parts[begin : self._place])

    def _object(self, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        while True:
            self._skip_blank()
            if (part := self._next()) in ("}", ""):
                self._place += 1
                return made
            if part == ",":
                self._place += 1
                continue
            key = self._string() if part == QUOTE else self._up_to(":", ",", "}").strip()
            self._skip_blank()
            if self._take() == ":":
                made[key] = self.value(depth + 1)
            else:
                self._place -= 1

    def _list(self, depth: int) -> list[Any]:
        made: list[Any] = []
        while True:
            self._skip_blank()
            if (part := self._next()) in ("]", "}", ""):
                self._place += part == "]"
                return made
            if part == ",":
                self._place += 1
            else:
                made.append(self.value(depth + 1))


def _plain(written: str) -> Any:
    plain = written.strip()
    if plain in ("true", "false", "null") or (NUMBER.fullmatch(plain) and isfinite(float(plain))):
        return json.loads(plain) if len(plain) < MAX_DIGITS else float(plain)
    return plain


STRING: Part = {"type": "tag", "begin": QUOTE, "content": {"type": "any_text"}, "end": QUOTE}
SCALARS = frozenset({"integer", "number", "boolean", "null"})
KEY: Part = {"type": "regex", "pattern": r"[^\s{}\[\],:<>]+"}


def _value(schema: Any, root: Schema, depth: int) -> Part:
    plain, types = resolved(schema, root), types_of(schema, root)
    if (choices := string_choices(schema, root)) is not None:
        return either([text(f"{QUOTE}{each}{QUOTE}") or {} for each in choices])
    if types and types <= SCALARS:
        return json_part(alone(plain, root))
    kinds = types or SCALARS | {"string", "object", "array"}
    depth += 1 if types else UNTYPED
    made = [STRING] if "string" in kinds else []
    if scalars := sorted(kinds & SCALARS):
        made.append(json_part({"type": scalars}))
    if depth < MAX_FORCED_DEPTH and "object" in kinds:
        made.append(_object(plain, root, depth))
    if depth < MAX_FORCED_DEPTH and "array" in kinds:
        item = _value(plain.get("items"), root, depth)
        more: Part = {"type": "star", "content": sequence(text(","), item)}
        made.append(sequence(text("["), optional(sequence(item, more)), text("]")))
    return either(made or [STRING])


def _object(schema: Schema, root: Schema, depth: int) -> Part:
    properties = properties_of(schema, root)
    if not properties:
        is_empty = schema.get("additionalProperties") is False
        member = sequence(KEY, text(":"), _value({}, {}, depth))
        more: Part = {"type": "star", "content": sequence(text(","), member)}
        inner = None if is_empty else optional(sequence(member, more))
    else:
        pairs = [
            (sequence(text(f"{name}:"), _value(each, root, depth)), is_needed)
            for name, (each, is_needed) in properties.items()
        ]
        inner = members(pairs, text(","))
    return sequence(text("{"), inner, text("}"))


def _call(function: Function) -> Part:
    root = resolved(function.parameters, function.parameters)
    return sequence(text(f"call:{function.name}"), _object(root, function.parameters, 0))


GEMMA = ChatFormat(GemmaCalls, _call, BEGIN, END, tokens=(QUOTE,), template=(BEGIN,))
