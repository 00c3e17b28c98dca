"""Calls as nested tags, each argument in one of its own: one parser and one grammar for the
families that write so, which differ in their texts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tllm_spec.chat_formats.chat_format import (
    WHITESPACE,
    ChatFormat,
    Function,
    Part,
    optional,
    sequence,
    text,
)
from tllm_spec.chat_formats.marked_calls import MarkedCalls
from tllm_spec.chat_formats.pieces import MAX_HEAD, Arguments, CallStart, Piece, Steps, num_held
from tllm_spec.chat_formats.schema_values import (
    ANY_JSON,
    as_json,
    is_json,
    properties_of,
    typed_part,
    types_of,
    with_root,
)

ANY_NAME: Part = {"type": "regex", "pattern": '[^<>"\n]+'}
BOOLEAN: Part = {"type": "regex", "pattern": "true|false"}


@dataclass(frozen=True)
class XmlTexts:
    """block: around one call, or if it is a section around several. head, key: patterns of the tags
    before a call and before a value, whose first group is the name. head_text: what is written,
    with {} for the name; key_text, too, maybe with another {} for "true" where the value is text,
    and in parts between which there may be white space. call_end: none if the block ends the call.
    strips: one line end on each side of a value is not of it. may_be_json: a call may be JSON."""

    block: str
    block_end: str
    head: str
    head_text: str
    call_end: str
    key: str
    key_text: tuple[str, ...]
    value_end: str
    is_section: bool = False
    strips: bool = False
    may_be_json: bool = False

    def format(self, *template: str, tokens: tuple[str, ...] = ()) -> ChatFormat:
        """The family's format. template, tokens: as of ChatFormat."""
        tokens, none = (*tokens, self.value_end, self.call_end), ("", "")
        block = (self.block, self.block_end)
        blocks = (*none, *block) if self.is_section else (*block, *none)
        parser = partial(XmlCalls, self)
        return ChatFormat(parser, self._call, *blocks, tokens=tokens, template=template)

    def _call(self, function: Function) -> Part:
        root = with_root(function.parameters)
        properties = properties_of(root, root)
        values: list[Part | None] = []
        for name, (schema, is_needed) in properties.items():
            typed = typed_part(schema, root)
            is_json = typed is not None and typed["type"] == "json_schema"
            part = self._value(text(name), text(str(not is_json).lower()), typed)
            values.append(part if is_needed else optional(part))
        if not properties and root.get("additionalProperties") is not False:
            values.append({"type": "star", "content": self._value(ANY_NAME, BOOLEAN, None)})
        head = text(self.head_text.format(function.name))
        return sequence(head, WHITESPACE, *values, text(self.call_end))

    def _value(self, name: Part | None, is_text: Part | None, typed: Part | None) -> Part:
        """A value with its tags. typed: None for any text."""
        fields, tags = iter((name, is_text)), list[Part | None]()
        for tag in self.key_text:
            first, *others = tag.split("{}")
            tags += [WHITESPACE, text(first)]
            for each in others:
                tags += [next(fields), text(each)]
        if typed is None:
            any_text = {"type": "tag", "begin": "", "content": {"type": "any_text"}}
            return sequence(*tags[1:], {**any_text, "end": self.value_end}, WHITESPACE)
        line = optional({"type": "const_string", "value": "\n"}) if self.strips else None
        around = WHITESPACE if typed["type"] == "json_schema" else line
        return sequence(*tags[1:], around, typed, around, text(self.value_end), WHITESPACE)


class XmlCalls(MarkedCalls):
    """Values that must be strings are given out as they come, others at their end. Ends of tags
    may be missing at the end of the text."""

    def __init__(self, texts: XmlTexts, functions: Sequence[Function] = ()) -> None:
        super().__init__(functions)
        self.start, self.end = texts.block, texts.block_end
        self._texts = texts
        self._head = re.compile(rf"\s*{texts.head}")
        self._closers = list(filter(None, (texts.value_end, texts.call_end, texts.block_end)))
        ends = "|".join(map(re.escape, self._closers[1:]))
        self._next = re.compile(f"{texts.key}|(?P<end>{ends})")
        self._other_end = re.compile(rf"\n?(?:{ends})" if texts.strips else ends)

    def call(self) -> Steps[None]:
        """Reads a block."""
        while self._texts.may_be_json and not self.text.strip() and not self.has_ended:
            yield None
        if self._texts.may_be_json and self.text.lstrip().startswith("{"):
            if raw := (yield from self.json_call()):
                yield self.shown(self.start + raw)
            else:
                yield from self.past(self.end)
            return
        head = yield from self.head(self._head)
        while head is not None:
            yield CallStart(head[1])
            is_closed = "closed" in head.groupdict() and head["closed"]
            yield from [Arguments("{}")] if is_closed else self._arguments(head[1])
            while (head := self._head.match(self.text, 0, MAX_HEAD)) is None:
                if self.end in self.text or self.has_ended:
                    yield from self.past(self.end)
                    return
                yield None
            self.taken(head.end())

    def _arguments(self, name: str) -> Steps[None]:
        """Reads values, and the end of the call. Without values there may be JSON in their
        place."""
        root = next((each.parameters for each in self.functions if each.name == name), {})
        begin, properties = "{", properties_of(root, root)
        while (found := self._next.search(self.text)) or not self.has_ended:
            if found is None:
                yield None
            elif found["end"] is None:
                self.taken(found.end())
                key = found[1].strip()
                yield Arguments(f"{begin}{json.dumps(key, ensure_ascii=False)}: ")
                types = types_of(properties.get(key, ({}, False))[0], root)
                yield from self._value(_TYPES.get(found.groupdict().get("is_text") or "", types))
                begin = ", "
            else:
                break
        body = self.taken(found.start() if found else None).strip()
        if begin == "{":
            yield Arguments(body if body.startswith("{") and is_json(body) else "{}")
        else:
            yield Arguments("}")
        self.text = self.text.removeprefix(self._texts.call_end)

    def _value(self, types: frozenset[str]) -> Steps[None]:
        is_string = types == {"string"}
        markers = self._closers
        if self._texts.strips:
            markers = [start + each for each in markers for start in ("", "\n")]
            yield from self.marker("\n", "")
        yield Arguments('"' if is_string else "")
        while self._texts.value_end not in self.text and not self.has_ended:
            if is_string:
                other = self._other_end.search(self.text)
                held = num_held(self.text, markers)
                yield _string(self.taken(other.start() if other else len(self.text) - held))
            yield None
        value, end, self.text = self.text.partition(self._texts.value_end)
        value = value if end else self._without_ends(value)
        if self._texts.strips:
            value = value.removesuffix("\n")
        if is_string:
            yield _string(value)
        yield Arguments('"' if is_string else as_json(value, types))

    def _without_ends(self, text: str) -> str:
        """A value that ends with the text, without the other ends and a part of one after it."""
        held = num_held(text, self._closers)
        text = text[: len(text) - held] if held > 1 else text
        while end := next((each for each in self._closers if text.rstrip().endswith(each)), None):
            text = text.rstrip()[: -len(end)]
        return text


# What a tag says about its value.
_TYPES = {"true": frozenset({"string"}), "false": ANY_JSON}


def _string(text: str) -> Piece:
    return Arguments(json.dumps(text, ensure_ascii=False)[1:-1])
