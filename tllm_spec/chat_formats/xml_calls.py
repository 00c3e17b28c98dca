"""Calls as nested tags, each argument in one of its own: one parser and one grammar for the
families that write so, which differ in their texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tllm_spec.chat_formats.chat_format import (
    WHITESPACE,
    ChatFormat,
    Function,
    Part,
    either,
    optional,
    sequence,
    text,
)
from tllm_spec.chat_formats.marked_calls import MAX_HEAD, MarkedCalls
from tllm_spec.chat_formats.pieces import Arguments, CallStart, JsonCall, Piece, num_held
from tllm_spec.chat_formats.schema_values import (
    as_json,
    is_json,
    properties_of,
    typed_part,
    types_of,
)

BOOLEANS = ("true", "false")  # whether a value is text


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
        root = function.parameters
        properties = properties_of(root, root)
        values: list[Part | None] = []
        for name, (schema, is_needed) in properties.items():
            part = self._value(name, typed_part(schema, root))
            values.append(part if is_needed else optional(part))
        if not properties and root.get("additionalProperties") is not False:
            values.append({"type": "star", "content": self._any_value()})
        head = text(self.head_text.format(function.name))
        return sequence(head, WHITESPACE, *values, text(self.call_end))

    def _value(self, name: str, typed: Part | None) -> Part:
        """A value with its tags. typed: None for any text."""
        is_json = typed is not None and typed["type"] == "json_schema"
        *first, last = [each.format(name, str(not is_json).lower()) for each in self.key_text]
        before = [part for each in first for part in (text(each), WHITESPACE)]
        if typed is None:
            return sequence(*before, self._any_text(last), WHITESPACE)
        line = optional({"type": "const_string", "value": "\n"}) if self.strips else None
        around = WHITESPACE if is_json else line
        return sequence(
            *before, text(last), around, typed, around, text(self.value_end), WHITESPACE
        )

    def _any_text(self, begin: str) -> Part:
        content = {"type": "any_text"}
        return {"type": "tag", "begin": begin, "content": content, "end": self.value_end}

    def _any_value(self) -> Part:
        """A value of any name: text, or JSON where tags say which."""
        name: Part = {"type": "regex", "pattern": '[^<>"\\n]+'}
        tags = dict.fromkeys("\1".join(self.key_text).format("\0", each) for each in BOOLEANS)
        begin = next(iter(tags)).split("\0")[0]
        return sequence(text(begin), name, either([self._after_name(each) for each in tags]))

    def _after_name(self, tag: str) -> Part:
        *first, last = tag.split("\0")[1].split("\1")
        before = [part for each in first for part in (text(each), WHITESPACE)]
        return sequence(*before, self._any_text(last), WHITESPACE)


class XmlCalls(MarkedCalls):
    """Values that must be strings are given out as they come, others at their end. Ends of tags
    may be missing at the end of the text."""

    def __init__(self, texts: XmlTexts, functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self.start, self.end = texts.block, texts.block_end
        self._texts, self._functions = texts, {each.name: each for each in functions}
        self._head = re.compile(rf"\s*{texts.head}")
        ends = {re.escape(each) for each in (texts.call_end, texts.block_end) if each}
        self._next = re.compile(rf"{texts.key}|(?P<end>{'|'.join(sorted(ends))})")
        line = "\n?" if texts.strips else ""
        self._closers = [texts.value_end, *filter(None, (texts.call_end, texts.block_end))]
        self._other_end = re.compile(f"{line}(?:{'|'.join(sorted(ends))})")

    def _begin(self) -> None:
        self._step: Callable[[str], tuple[list[Piece], str]] = self._in_block
        self._has_called = False

    def _inside(self, text: str) -> tuple[list[Piece], str]:
        return self._step(text)

    def _in_block(self, text: str) -> tuple[list[Piece], str]:
        if self._texts.may_be_json and text.lstrip()[:1] == "{":
            self._json, self._step = JsonCall(), self._in_json
            return self._in_json(text)
        if found := self._head.match(text, 0, MAX_HEAD):
            self._called, self._has_called, self._num_values = found[1], True, 0
            self._step = self._in_function
            pieces: list[Piece] = [CallStart(found[1])]
            if "closed" in found.groupdict() and found["closed"]:
                pieces += self._ended()
            return pieces, text[found.end() :]
        content, marker, rest = text.partition(self.end)
        if not marker:
            return [], text
        return self._block_ended(None if self._has_called else content), rest

    def _block_ended(self, content: str | None) -> list[Piece]:
        """content: of a block that has no call, which is text."""
        self._in_call = False
        pieces = [] if content is None else self._shown(f"{self.start}{content}{self.end}")
        self._after_call = True
        return pieces

    def _in_json(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        if not self._json.is_done:
            pieces, text = self._json.feed(text)
            if not self._json.is_done:
                return pieces, text
        _, marker, rest = text.partition(self.end)
        if not marker:
            return pieces, text
        return pieces + self._block_ended(None if self._json.has_started else self._json.raw), rest

    def _in_function(self, text: str) -> tuple[list[Piece], str]:
        """Between the values of a call."""
        found = self._next.search(text)
        if found is None:
            return [], text
        if found["end"] is None:
            return self._value_begins(found), text[found.end() :]
        body, rest = text[: found.start()].strip(), text[found.start() :]
        pieces = self._ended(body)
        if found["end"] == self._texts.call_end:
            return pieces, rest[len(found["end"]) :]
        more, rest = self._in_block(rest)
        return pieces + more, rest

    def _ended(self, body: str = "") -> list[Piece]:
        """body: what a call without values has in their place, maybe the arguments as JSON."""
        self._step = self._in_block
        if self._num_values:
            return [Arguments("}")]
        return [Arguments(body if body[:1] == "{" and is_json(body) else "{}")]

    def _value_begins(self, found: re.Match[str]) -> list[Piece]:
        key, function = found[1].strip(), self._functions.get(self._called)
        self._types = frozenset[str]()
        if function is not None:
            root = function.parameters
            self._types = types_of(properties_of(root, root).get(key, ({}, False))[0], root)
        self._is_json = False
        if (is_text := found.groupdict().get("is_text")) is not None:
            self._types = frozenset({"string"}) if is_text == "true" else frozenset()
            self._is_json = is_text == "false"
        self._step, self._is_first = self._in_value, True
        self._num_values += 1
        begin = "{" if self._num_values == 1 else ", "
        begun = f"{begin}{json.dumps(key, ensure_ascii=False)}: "
        return [Arguments(begun + ('"' if self._is_string else ""))]

    @property
    def _is_string(self) -> bool:
        return self._types == {"string"}

    def _in_value(self, text: str) -> tuple[list[Piece], str]:
        value, marker, rest = text.partition(self._texts.value_end)
        if marker:
            self._step = self._in_function
            return self._written(value, is_end=True), rest
        if not self._is_string:
            return [], text
        other = self._other_end.search(text)
        line = "\n" if self._texts.strips else ""
        markers = [start + each for each in self._closers for start in {"", line}]
        length = len(text) - num_held(text, markers) if other is None else other.start()
        return self._written(text[:length], is_end=False), text[length:]

    def _written(self, value: str, *, is_end: bool) -> list[Piece]:
        """The next text of the value."""
        if self._texts.strips and value:
            value = value[self._is_first and value[0] == "\n" :]
            value = value[:-1] if is_end and value[-1:] == "\n" else value
            self._is_first = False
        if self._is_string:
            inner = json.dumps(value, ensure_ascii=False)[1:-1]
            return [Arguments(inner + ('"' if is_end else ""))] if inner or is_end else []
        if self._is_json and is_json(value):
            return [Arguments(value.strip())]
        return [Arguments(as_json(value, self._types))]

    def _unfinished(self, text: str) -> list[Piece]:
        if self._step == self._in_json:
            return [] if self._json.has_started else self._shown(self.start + self._json.raw + text)
        if self._step == self._in_value:
            return [*self._written(self._without_ends(text), is_end=True), Arguments("}")]
        if self._step == self._in_function:
            return self._ended(text.strip())
        return [] if self._has_called else self._shown(f"{self.start}{text}")

    def _without_ends(self, text: str) -> str:
        """A value that ends with the text, without the other ends and a part of one after it."""
        held = num_held(text, self._closers)
        text = text[: len(text) - held] if held > 1 else text
        while end := next((each for each in self._closers if text.rstrip().endswith(each)), None):
            text = text.rstrip()[: -len(end)]
        return text
