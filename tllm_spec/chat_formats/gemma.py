"""Calls of Gemma 4, with values in a syntax of its own: keys have no quotes, strings have tokens
around them."""

from __future__ import annotations

import json
import re
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
from tllm_spec.chat_formats.marked_calls import MarkedCalls
from tllm_spec.chat_formats.pieces import Arguments, CallStart, Steps, num_held
from tllm_spec.chat_formats.schema_values import (
    NO_SCHEMA,
    alone,
    as_json,
    properties_of,
    resolved,
    string_choices,
    types_of,
    with_root,
)

BEGIN, END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
HEAD = re.compile(r"\s*call:([^\s{}<]+)\s*(?=\{)")
PARTS = re.compile(r"(Q.*?(?:Q|\Z)|[{}\[\],:])".replace("Q", re.escape(QUOTE)), re.DOTALL)
MAX_DEPTH = 64  # of a value that is read
# Of values in a grammar, each one of whose type the schema says nothing counting three times.
# Deeper ones are texts and numbers.
MAX_FORCED_DEPTH = 6
UNTYPED = 3


class GemmaCalls(MarkedCalls):
    """The arguments are given out at the end of a call."""

    start, end = BEGIN, END

    def call(self) -> Steps[None]:
        if (head := (yield from self.head(HEAD))) is None:
            return
        yield CallStart(head[1])
        while (found := _end(self.text)) < 0 and not self.has_ended:
            yield None
        held = num_held(self.text, (END, QUOTE))
        written = self.taken(found if found >= 0 else len(self.text) - held)
        self.text = self.text[len(END) if found >= 0 else held :]
        parts = [each for each in PARTS.split(written) if each.strip()]
        yield Arguments(_value(parts[::-1]))


def _end(text: str) -> int:
    """Where END is that is in no string; -1 if it is not there."""
    position = text.find(END)
    while position >= 0 and text.count(QUOTE, 0, position) % 2:
        position = text.find(END, position + 1)
    return position


def _value(parts: list[str], depth: int = 0) -> str:
    """Reads a value from the end of `parts`, as far as it goes: what is open at the end of the text
    ends there. Returns its JSON."""
    first = parts[-1] if parts else ""
    if first in ("{", "[") and depth < MAX_DEPTH:
        read = _members if parts.pop() == "{" else _items
        return read(parts, depth + 1)
    if first.startswith(QUOTE):
        return _string(parts.pop())
    written = ""
    while parts and parts[-1] not in (",", "}", "]"):
        written += parts.pop()
    return as_json(written.strip(), frozenset())


def _members(parts: list[str], depth: int) -> str:
    made: dict[str, str] = {}
    while parts and (key := parts.pop()) != "}":
        if parts and parts[-1] == ":":
            parts.pop()
            made[_string(key.strip())] = _value(parts, depth)
    return f"{{{', '.join(f'{key}: {value}' for key, value in made.items())}}}"


def _items(parts: list[str], depth: int) -> str:
    made: list[str] = []
    while parts and parts[-1] not in ("]", "}"):
        if parts[-1] == ",":
            parts.pop()
        else:
            made.append(_value(parts, depth))
    if parts and parts[-1] == "]":
        parts.pop()
    return f"[{', '.join(made)}]"


def _string(text: str) -> str:
    return json.dumps(text.removeprefix(QUOTE).removesuffix(QUOTE), ensure_ascii=False)


Known = dict[tuple[int, int], Part]
STRING: Part = {"type": "tag", "begin": QUOTE, "content": {"type": "any_text"}, "end": QUOTE}
SCALARS = frozenset({"integer", "number", "boolean", "null"})
KEY: Part = {"type": "regex", "pattern": r"[^\s{}\[\],:<>]+"}


def _value_part(schema: Any, root: Schema, depth: int, known: Known) -> Part:
    """known: the parts made so far; references may lead to a schema many times."""
    place = (id(resolved(schema, root)), depth)
    if place not in known:
        known[place] = _new_value_part(schema, root, depth, known)
    return known[place]


def _new_value_part(schema: Any, root: Schema, depth: int, known: Known) -> Part:
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
        made.append(_object_part(plain, root, depth, known))
    if depth < MAX_FORCED_DEPTH and "array" in kinds:
        item = _value_part(plain.get("items"), root, depth, known)
        more: Part = {"type": "star", "content": sequence(text(","), item)}
        made.append(sequence(text("["), optional(sequence(item, more)), text("]")))
    return either(made or [STRING])


def _object_part(schema: Schema, root: Schema, depth: int, known: Known) -> Part:
    properties = properties_of(schema, root)
    if not properties:
        is_empty = schema.get("additionalProperties") is False
        member = sequence(KEY, text(":"), _value_part(NO_SCHEMA, NO_SCHEMA, depth, known))
        more: Part = {"type": "star", "content": sequence(text(","), member)}
        inner = None if is_empty else optional(sequence(member, more))
    else:
        pairs = [
            (sequence(text(f"{name}:"), _value_part(each, root, depth, known)), is_needed)
            for name, (each, is_needed) in properties.items()
        ]
        inner = members(pairs, text(","))
    return sequence(text("{"), inner, text("}"))


def _call(function: Function) -> Part:
    root = with_root(function.parameters)
    own = _object_part(resolved(root, root), root, 0, {})
    return sequence(text(f"call:{function.name}"), own)


GEMMA = ChatFormat(GemmaCalls, _call, BEGIN, END, tokens=(QUOTE,), template=(BEGIN,))
