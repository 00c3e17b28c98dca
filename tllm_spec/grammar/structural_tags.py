"""Structural tags, in xgrammar's format, as grammars of llguidance: each part of the format becomes
an expression of Lark, and its JSON schemas, regular expressions and EBNF grammars of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tllm_spec.config.option_checks import shown

TAG_FORM = """a structural tag has a format, such as {"type": "structural_tag", "format": {"type": \
"triggered_tags", "triggers": [...], "tags": [{"begin": "...", "content": {"type": "json_schema", \
"json_schema": {...}}, "end": "..."}]}}"""
ANY_TEXT = "ANY_TEXT: /(?s:.*)/"
Part = Mapping[str, Any]


class TagGrammar:
    """of_schema: makes a grammar of a JSON schema; of_regex, of_ebnf: Lark of their texts."""

    def __init__(
        self,
        of_schema: Callable[[Any], dict[str, Any]],
        of_regex: Callable[[str], str],
        of_ebnf: Callable[[str], str],
    ) -> None:
        self._of_schema, self._of_regex, self._of_ebnf = of_schema, of_regex, of_ebnf
        self._rules = [ANY_TEXT]
        self._grammars: list[dict[str, Any]] = []

    def of(self, tag: Any) -> list[dict[str, Any]]:
        """The grammars, that of the whole text first. Raises ValueError for what is not served."""
        if not isinstance(tag, dict) or not isinstance(tag.get("format"), dict):
            raise ValueError(TAG_FORM)
        start = f"start: {self._expression(tag['format'], is_last=True)}"
        return [{"lark_grammar": "\n".join([start, *self._rules])}, *self._grammars]

    def _expression(self, part: Any, *, is_last: bool) -> str:
        """is_last: nothing follows it, so it may be text without an end."""
        kinds: dict[str, Callable[[Part, bool], str]] = {
            "any_text": self._any_text,
            "const_string": lambda part, _: _quoted(_text(part, "value")),
            "grammar": lambda part, _: self._lark(self._of_ebnf(_text(part, "grammar"))),
            "json_schema": self._schema,
            "or": self._any_of,
            "regex": lambda part, _: self._lark(self._of_regex(_text(part, "pattern"))),
            "sequence": self._sequence,
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
        }
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise ValueError(f"a part with type = {shown(kind)}: {', '.join(kinds)} are accepted")
        return kinds[kind](_known(part, KEYS[kind]), is_last)

    def _any_text(self, part: Part, is_last: bool) -> str:
        if not is_last:
            raise ValueError("any_text is served where a tag ends it, or the whole text")
        return "ANY_TEXT"

    def _any_of(self, part: Part, is_last: bool) -> str:
        elements = _list(part, "elements")
        return _either([self._expression(each, is_last=is_last) for each in elements])

    def _sequence(self, part: Part, is_last: bool) -> str:
        *elements, last = _list(part, "elements")
        inner = [self._expression(each, is_last=False) for each in elements]
        return f"({' '.join([*inner, self._expression(last, is_last=is_last)])})"

    def _tag(self, part: Part, is_last: bool) -> str:
        return f"({_quoted(_text(part, 'begin', empty=True))} {self._rest(part, is_last)})"

    def _rest(self, tag: Part, is_last: bool) -> str:
        """What follows the beginning of a tag."""
        end = tag.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(each, str) for each in ends or [0]):
            raise ValueError(f"end = {shown(end)}: a text or a list of texts is needed")
        after, content = _either(map(_quoted, ends)), _value(tag, "content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            _known(content, KEYS["any_text"])
            return self._up_to(after)
        return f"{self._expression(content, is_last=is_last and ends == [''])} {after}"

    def _up_to(self, end: str) -> str:
        """Any text up to the first of what `end` matches."""
        return self._rule(f"ANY_TEXT {end}", "[lazy]")

    def _triggered(self, part: Part, is_last: bool) -> str:
        triggers, tags = _list(part, "triggers"), self._tags(part)
        is_end = is_last and bool(part.get("stop_after_first"))
        made: list[str] = []
        for tag in tags:
            begin = _text(tag, "begin")
            found = [each for each in triggers if isinstance(each, str) and begin.startswith(each)]
            if len(found) != 1 or not found[0]:
                raise ValueError(f"begin = {shown(begin)} needs one of the triggers at its start")
            head, more = self._up_to(_quoted(found[0])), begin[len(found[0]) :]
            rest = self._rest(tag, is_end)
            made.append(self._rule(f"{head} {_quoted(more)} {rest}"))
        first = ""
        if part.get("at_least_one"):
            first = _either(self._tag(each, is_end) for each in tags)  # without text before it
            if part.get("stop_after_first"):
                return first
        if not is_last:
            raise ValueError("triggered_tags are served at the end of the text only")
        if part.get("stop_after_first"):
            return f"({_either(made)} | ANY_TEXT)"
        return f"({first} {_either(made)}* ANY_TEXT)"

    def _separated(self, part: Part, is_last: bool) -> str:
        tag = _either(self._tag(each, False) for each in self._tags(part))
        if not part.get("stop_after_first"):
            tag = f"({tag} ({_quoted(_text(part, 'separator', empty=True))} {tag})*)"
        return tag if part.get("at_least_one") else f"({tag})?"

    def _tags(self, part: Part) -> list[Part]:
        tags = _list(part, "tags")
        if not all(isinstance(each, dict) for each in tags):
            raise ValueError("tags: a list of tags is needed")
        return [_known(each, KEYS["tag"]) for each in tags]

    def _schema(self, part: Part, is_last: bool) -> str:
        return self._inner(self._of_schema(_value(part, "json_schema")))

    def _lark(self, text: str) -> str:
        return self._inner({"lark_grammar": text})

    def _inner(self, grammar: dict[str, Any]) -> str:
        name = f"inner_{len(self._grammars)}"
        self._grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _rule(self, body: str, options: str = "") -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name


KEYS: Mapping[str, frozenset[str]] = {
    "any_text": frozenset(),
    "const_string": frozenset({"value"}),
    "grammar": frozenset({"grammar"}),
    "json_schema": frozenset({"json_schema"}),
    "or": frozenset({"elements"}),
    "regex": frozenset({"pattern"}),
    "sequence": frozenset({"elements"}),
    "tag": frozenset({"begin", "content", "end"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first"}),
}
# Other keys of xgrammar's that have no effect with these values.
HARMLESS = {"excludes": [], "style": "json", "any_order": False, "syntax": "ebnf"}


def _known(part: Part, keys: frozenset[str]) -> Part:
    for name, value in part.items():
        is_harmless = name in HARMLESS and value == HARMLESS[name]
        if name not in keys and name != "type" and not is_harmless and value is not None:
            raise ValueError(f"{name} = {shown(value)} in a structural tag is not served")
    return part


def _value(part: Part, name: str) -> Any:
    if name not in part:
        raise ValueError(f"{name} is missing in a part of type {part.get('type')}")
    return part[name]


def _text(part: Part, name: str, *, empty: bool = False) -> str:
    value = part.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"{name} = {shown(value)}: a text is needed")
    return value


def _list(part: Part, name: str) -> list[Any]:
    value = part.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} = {shown(value)}: a list is needed")
    return value


def _either(expressions: Any) -> str:
    made: Sequence[str] = list(expressions)
    return made[0] if len(made) == 1 else f"({' | '.join(made)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
