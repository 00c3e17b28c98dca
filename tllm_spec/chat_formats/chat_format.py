"""How a family of models writes calls of functions: a parser of its answers, and a structural tag
of calls that match the functions' schemas."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tllm_spec.chat_formats.pieces import Parser

Part = dict[str, Any]  # of a structural tag
Schema = Mapping[str, Any]
WHITESPACE: Part = {"type": "whitespace"}  # none, too
ANY_ARGUMENTS: Schema = {"type": "object"}
MAX_ORDERED = 8  # members of which none is needed; the grammar grows with the square


class Function(NamedTuple):
    """What may be called. parameters: the JSON schema of its arguments, an object."""

    name: str
    parameters: Schema = ANY_ARGUMENTS
    is_strict: bool = False


@dataclass(frozen=True)
class ChatFormat:
    """new_parser: makes a parser for the functions that are offered. call: what is written of one
    call between call_begin and call_end. begin, end: around all calls; list_begin follows begin,
    maybe after white space. tokens: other markers that may be tokens. template: texts that the
    family's chat templates have. new_id: makes the id of a call where templates accept only some.
    lone_calls: an answer that has calls begins with this, and has nothing else; other families
    write calls after text, too."""

    new_parser: Callable[[Sequence[Function]], Parser]
    call: Callable[[Function], Part]
    call_begin: str = ""
    call_end: str = ""
    begin: str = ""
    end: str = ""
    separator: str = ""
    list_begin: str = ""
    tokens: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    new_id: Callable[[], str] | None = None
    lone_calls: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that are markers where they are tokens of their own."""
        around = (self.begin, self.call_begin, self.call_end, self.end)
        return tuple(each for each in (*around, *self.tokens) if len(each) > 1)

    def calls_tag(self, functions: Sequence[Function], *, is_parallel: bool) -> Part:
        """The part of a structural tag that is one call, or several, and nothing else."""
        calls = self._calls(functions, is_parallel=is_parallel)
        end = sequence(WHITESPACE, text(self.end)) if self.end else None
        return sequence(WHITESPACE, text(self.begin), WHITESPACE, calls, end)

    def answer_tag(self, functions: Sequence[Function], *, is_parallel: bool) -> Part:
        """The part that is any text, in which calls match: those of strict functions their schemas,
        and those of others are of any arguments."""
        known = [each if each.is_strict else Function(each.name) for each in functions]
        if self.lone_calls:
            other = {"type": "regex", "pattern": rf"([^\s{self.lone_calls}][\s\S]*)?"}
            return either([self.calls_tag(known, is_parallel=is_parallel), other])
        calls = self._calls(known, is_parallel=is_parallel)
        section = self._tag(self.begin, calls, self.end)
        call = self._tag(self.call_begin, self._inner(known), self.call_end)
        tags = [each for each in (section, call) if each["begin"]]
        triggers = [each["begin"] for each in tags]
        kind = {"type": "triggered_tags", "stop_after_first": not is_parallel}
        return {**kind, "triggers": triggers, "tags": tags}

    def _tag(self, begin: str, content: Part, end: str) -> Part:
        inner = sequence(WHITESPACE, content, WHITESPACE)
        return {"type": "tag", "begin": begin, "content": inner, "end": end}

    def _calls(self, functions: Sequence[Function], *, is_parallel: bool) -> Part:
        inner = sequence(WHITESPACE, self._inner(functions), WHITESPACE)
        first = sequence(text(self.list_begin), WHITESPACE) if self.list_begin else None
        call = sequence(text(self.call_begin), inner, text(self.call_end))
        if not is_parallel:
            return sequence(first, call)
        if not self.separator:
            return sequence(first, {"type": "plus", "content": sequence(call, WHITESPACE)})
        more = sequence(WHITESPACE, text(self.separator), WHITESPACE, call)
        return sequence(first, call, {"type": "star", "content": more})

    def _inner(self, functions: Sequence[Function]) -> Part:
        return either([self.call(each) for each in functions])


def text(value: str) -> Part | None:
    """None for no text."""
    return {"type": "const_string", "value": value} if value else None


def json_part(schema: Schema) -> Part:
    """JSON that matches the schema."""
    return {"type": "json_schema", "json_schema": schema}


def json_call(function: Function, arguments_key: str = "arguments") -> Part:
    """A call as a JSON object with a name and arguments."""
    # With an $id of its own its references are to itself.
    own = {"$id": f"function:{function.name}", "type": "object", **function.parameters}
    properties = {"name": {"const": function.name}, arguments_key: own}
    needed = {"required": list(properties), "additionalProperties": False}
    return json_part({"type": "object", "properties": properties, **needed})


def calls_schema(functions: Sequence[Function], *, is_parallel: bool) -> Schema:
    """The schema of a JSON list of calls, which are forced where no format is known."""
    numbered = [
        each._replace(parameters={"$id": f"function:{number}", **each.parameters})
        for number, each in enumerate(functions)
    ]
    calls = [json_call(each, "parameters")["json_schema"] for each in numbered]
    limit = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}


def named_call(function: Function, separator: str) -> Part:
    """A call as a name, a separator and arguments."""
    return sequence(text(function.name + separator), arguments(function))


def arguments(function: Function) -> Part:
    """The arguments as a JSON object."""
    written = json_part({"type": "object", **function.parameters})
    return sequence(WHITESPACE, written, WHITESPACE)


def sequence(*parts: Part | None) -> Part:
    """Parts one after the other. Those of inner sequences are in it; of two parts of white space
    that meet one is left, and texts that meet are one."""
    flat: list[Part] = []
    for part in parts:
        inner = part["elements"] if part and part["type"] == "sequence" else [part]
        for each in filter(None, inner):
            last = flat[-1] if flat else {"type": None}
            if each["type"] == last["type"] == "const_string":
                flat[-1] = {**last, "value": last["value"] + each["value"]}
            elif each != WHITESPACE or last != WHITESPACE:
                flat.append(each)
    return flat[0] if len(flat) == 1 else {"type": "sequence", "elements": flat}


def either(parts: Sequence[Part]) -> Part:
    """One of the parts."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def optional(part: Part) -> Part:
    """The part, or nothing."""
    return {"type": "optional", "content": part}


def members(parts: Sequence[tuple[Part, bool]], separator: Part | None) -> Part | None:
    """Parts in their order, each with whether it is needed, and separators between those that are
    there. None for no parts. Many parts of which none is needed may come in any order."""
    first = next((place for place, (_, is_needed) in enumerate(parts) if is_needed), None)
    if first is not None:
        before = [optional(sequence(part, separator)) for part, _ in parts[:first]]
        return sequence(*before, parts[first][0], *_after(parts[first + 1 :], separator))
    if len(parts) > MAX_ORDERED:
        any_part = either([part for part, _ in parts])
        more: Part = {"type": "star", "content": sequence(separator, any_part)}
        return optional(sequence(any_part, more))
    firsts = [
        sequence(part, *_after(parts[place + 1 :], separator))
        for place, (part, _) in enumerate(parts)
    ]
    return optional(either(firsts)) if firsts else None


def _after(parts: Sequence[tuple[Part, bool]], separator: Part | None) -> list[Part]:
    rest = [(sequence(separator, part), is_needed) for part, is_needed in parts]
    return [part if is_needed else optional(part) for part, is_needed in rest]


def num_chars(part: Any, known: dict[int, int] | None = None) -> int:
    """Characters of the part's JSON, about: a part that stands in several places is counted, not
    written, for each. known: of parts by their ids."""
    known = {} if known is None else known
    if id(part) not in known:
        inner = [*part, *part.values()] if isinstance(part, dict) else part
        is_plain = not inner or not isinstance(inner, list)
        own = len(json.dumps(part)) if is_plain else sum(num_chars(each, known) for each in inner)
        known[id(part)] = own
    return known[id(part)]
