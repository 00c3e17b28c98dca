"""Structural tags, in xgrammar's format, as grammars of llguidance: each part of the format becomes
an expression of Lark, and its JSON schemas, regular expressions and EBNF grammars of their own.

Literals (`begin`, `end`, `value`, triggers, markers) are text, but for the names of tokens: these
are the tokens themselves, as a tokenizer reads them. Text up to a token may be any tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tllm_spec.config.option_checks import shown

TAG_FORM = """a structural tag has a format, such as {"type": "structural_tag", "format": {"type": \
"triggered_tags", "triggers": [...], "tags": [{"begin": "...", "content": {"type": "json_schema", \
"json_schema": {...}}, "end": "..."}]}}"""
# Between two tokens of JSON, and between parts: a small model might write nothing else.
MAX_WHITESPACE = 32
WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"
TAGS_AT_END = "triggered_tags are served at the end of the text only"
TERMINALS = ("ANY_TEXT: /(?s:.*)/", f"WHITESPACE: /{WHITESPACE}/")
Part = Mapping[str, Any]


@dataclass(frozen=True)
class NamedTokens:
    """Tokens of a vocabulary. ids: by their names in literals. special: the ids of those that
    text cannot be written with, without end_ids, which end a text."""

    ids: Mapping[str, int] = field(default_factory=dict)
    special: frozenset[int] = frozenset()
    end_ids: frozenset[int] = frozenset()

    def parts(self, literal: str) -> list[str | int]:
        """A literal as texts and ids of tokens. Of two names at one place the longer counts."""
        if not self.ids or not literal:
            return [literal]
        names = sorted(map(re.escape, self.ids), key=len, reverse=True)
        found = re.split(f"({'|'.join(names)})", literal)
        return [self.ids.get(each, each) for each in found if each]

    def split(self, literals: Iterable[str]) -> tuple[list[int], list[str]]:
        """The tokens of literals that have one, and the others, which are text."""
        ids, texts = list[int](), list[str]()
        for literal in literals:
            own = [each for each in self.parts(literal) if isinstance(each, int)]
            ids, texts = [*ids, *own[:1]], [*texts, *([] if own else [literal])]
        return ids, texts


class TagGrammar:
    """of_schema: makes a grammar of a JSON schema; of_regex, of_ebnf: Lark of their texts."""

    def __init__(
        self,
        of_schema: Callable[[Any], dict[str, Any]],
        of_regex: Callable[[str], str],
        of_ebnf: Callable[[str], str],
        tokens: NamedTokens,
    ) -> None:
        self._of_schema, self._of_regex, self._of_ebnf = of_schema, of_regex, of_ebnf
        self._tokens = tokens
        self._rules = list(TERMINALS)
        self._grammars: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of rules and grammars, by their texts

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
            "const_string": lambda part, _: self._literal(_text(part, "value")),
            "grammar": lambda part, _: self._lark(self._of_ebnf(_text(part, "grammar"))),
            "json_schema": self._schema,
            "optional": lambda part, is_last: f"{self._content(part, is_last)}?",
            "or": self._any_of,
            "plus": lambda part, _: f"{self._content(part)}+",
            "reasoning": lambda part, is_last: self._reasoning(part, [], is_last),
            "regex": lambda part, _: self._lark(self._of_regex(_text(part, "pattern"))),
            "sequence": self._sequence,
            "star": lambda part, _: f"{self._content(part)}*",
            "tag": self._tag,
            "tags_with_separator": self._separated,
            "triggered_tags": self._triggered,
            "whitespace": lambda part, _: "WHITESPACE?",
        }
        kind = _type(part)
        if kind not in kinds:
            raise ValueError(f"a part with type = {shown(kind)}: {', '.join(kinds)} are accepted")
        return kinds[kind](_known(part, KEYS[kind]), is_last)

    def _content(self, part: Part, is_last: bool = False) -> str:
        return f"({self._expression(_value(part, 'content'), is_last=is_last)})"

    def _any_text(self, part: Part, is_last: bool) -> str:
        if not is_last:
            raise ValueError("any_text is served before a literal, or at the end of the text")
        return self._free(_texts(part, "excludes"))

    def _any_of(self, part: Part, is_last: bool) -> str:
        elements = _list(part, "elements")
        return _either([self._expression(each, is_last=is_last) for each in elements])

    def _sequence(self, part: Part, is_last: bool) -> str:
        return f"({self._parts(_list(part, 'elements'), is_last)})"

    def _parts(self, parts: Sequence[Any], is_last: bool) -> str:
        """What follows each other."""
        if not parts:
            return '""'
        first, rest = parts[0], parts[1:]
        if rest and _type(first) == "reasoning":
            return self._reasoning(_known(first, KEYS["reasoning"]), rest, is_last)
        if rest and _type(first) == "any_text" and (heads := _heads(rest[0])):
            excludes = _texts(_known(first, KEYS["any_text"]), "excludes")
            return _either(self._text_before(heads, rest, is_last, excludes).values())
        own = self._expression(first, is_last=is_last and not rest)
        return f"{own} {self._parts(rest, is_last)}" if rest else own

    def _reasoning(self, part: Part, rest: Sequence[Any], is_last: bool) -> str:
        """A section, white space, and the parts after it. Calls that end a section follow it
        directly."""
        begin, end, section = _text(part, "begin"), _text(part, "end"), part.get("section")
        if section not in ("inside", "undecided"):
            raise ValueError(f"section = {shown(section)}: inside and undecided are accepted")
        then = self._rule(f"WHITESPACE? {self._parts(rest, is_last)}")
        calls = self._text_before(_texts(part, "ends_at"), rest, is_last, [end])
        inside = _either([f"{self._until([end], list(calls))} {then}", *calls.values()])
        if section == "inside":
            return inside
        return f"(WHITESPACE? {self._literal(begin)} {inside} | {then})"

    def _text_before(
        self, heads: Sequence[str], parts: Sequence[Any], is_last: bool, excludes: list[str]
    ) -> dict[str, str]:
        """For each head that the parts may begin with: any text up to the first head, and the
        parts."""
        after = {head: self._after(head, parts, is_last) for head in heads}
        found = {head: each for head, each in after.items() if each}
        return {
            head: f"{self._until([head], [*excludes, *(found.keys() - {head})])} {each}"
            for head, each in found.items()
        }

    def _after(self, head: str, parts: Sequence[Any], is_last: bool) -> str:
        """What follows `head` in texts of the parts that begin with it; empty if none does."""
        if not parts:
            return ""
        part, rest = parts[0], parts[1:]
        kind, ends = _type(part), is_last and not rest
        made: list[str] = []
        if kind == "const_string" and _text(part, "value").startswith(head):
            made = [self._literal(part["value"][len(head) :])]
        elif kind == "tag" and _text(part, "begin", empty=True).startswith(head):
            made = [f"{self._literal(part['begin'][len(head) :])} {self._rest(part, ends)}"]
        elif kind == "sequence":
            made = [self._after(head, _list(part, "elements"), ends)]
        elif kind == "or":
            made = [self._after(head, [each], ends) for each in _list(part, "elements")]
        elif kind in ("optional", "plus", "star"):
            more = [] if kind == "optional" else [{"type": "star", "content": part["content"]}]
            made = [self._after(head, [_value(part, "content"), *more], ends)]
        elif kind in ("tags_with_separator", "triggered_tags"):
            is_end, more_tags = self._more(part, ends)
            tags = [self._after(head, [each], is_end) for each in self._tags(part)]
            made = [f"{each} {more_tags}" for each in tags if each]
        made = [f"{each} {self._parts(rest, is_last)}" for each in made if each]
        if kind in ("optional", "star", "whitespace"):
            made += filter(None, [self._after(head, rest, is_last)])
        return _either(made) if made else ""

    def _tag(self, part: Part, is_last: bool) -> str:
        return f"({self._literal(_text(part, 'begin', empty=True))} {self._rest(part, is_last)})"

    def _rest(self, tag: Part, is_last: bool) -> str:
        """What follows the beginning of a tag."""
        end = tag.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(each, str) for each in ends or [0]):
            raise ValueError(f"end = {shown(end)}: a text or a list of texts is needed")
        content = _value(tag, "content")
        if _type(content) == "any_text" and all(ends):
            return self._until(ends, _texts(_known(content, KEYS["any_text"]), "excludes"))
        after = _either(map(self._literal, ends))
        return f"{self._expression(content, is_last=is_last and ends == [''])} {after}"

    def _until(self, literals: Sequence[str], excludes: Sequence[str] = ()) -> str:
        """Any tokens but the end tokens, up to the first of the literals, and that."""
        after = _either(map(self._literal, literals))
        ids, texts = self._tokens.split([*literals, *excludes])
        split = [self._tokens.parts(each) for each in literals]
        if not texts and all(isinstance(each[0], int) for each in split):
            return f"{self._any_but(ids)} {after}"
        excluded = self._tokens.split(excludes)[1]
        text, special = self._text_without(excluded, ids)
        plain = [_quoted(each[0]) for each in split if len(each) == 1 and isinstance(each[0], str)]
        made = [self._rule(f"{text} {_either(plain)}", "[lazy]")] if plain else []
        for literal, (head, *more) in zip(literals, split, strict=True):
            if isinstance(head, int):
                made.append(f"{text} {self._literal(literal)}")
            elif more:  # the token ends the text, which ends with the literal's beginning
                own = self._rule(f"{text} {_quoted(head)}", is_terminal=True)
                made.append(f"{own} {self._literal(literal[len(head) :])}")
        return f"{special} {_either(made)}"

    def _free(self, excludes: Sequence[str] = ()) -> str:
        """Any tokens but the end tokens, to the end of the text."""
        ids, texts = self._tokens.split(excludes)
        if ids and not texts:
            return self._any_but(ids)
        text, special = self._text_without(texts, ids)
        return f"({special} {text})"

    def _any_but(self, ids: Sequence[int]) -> str:
        """Any tokens but these and the end tokens. Where they may follow, text is read as them."""
        return f"<[^{','.join(map(str, sorted(self._tokens.end_ids.union(ids))))}]>*"

    def _text_without(self, texts: Sequence[str], ids: Sequence[int]) -> tuple[str, str]:
        """A terminal of text, and an expression of text that special tokens end; both without these
        texts and tokens."""
        names = [name for name, token in self._tokens.ids.items() if token in ids]
        own = [each for each in names if self._tokens.ids[each] not in self._tokens.special]
        text = "ANY_TEXT"
        if excluded := [*texts, *own]:
            inside = _either(map(_quoted, excluded))
            text = self._rule(f"ANY_TEXT & ~(ANY_TEXT {inside} ANY_TEXT)", is_terminal=True)
        free = ",".join(map(str, sorted(self._tokens.special.difference(ids))))
        return text, f"({text} <[{free}]>)*" if free else ""

    def _literal(self, literal: str) -> str:
        parts = self._tokens.parts(literal)
        return " ".join(f"<[{each}]>" if isinstance(each, int) else _quoted(each) for each in parts)

    def _triggered(self, part: Part, is_last: bool) -> str:
        is_end, more = self._more(part, is_last)
        if part.get("at_least_one"):
            first = _either(self._tag(each, is_end) for each in self._tags(part))  # no text before
            return f"({first} {more})"
        if not is_last:
            raise ValueError(TAGS_AT_END)
        if is_end:
            more = f"{self._calls_in_text(part, True)} | {self._free(_texts(part, 'triggers'))}"
        return f"({more})"

    def _more(self, part: Part, is_last: bool) -> tuple[bool, str]:
        """Whether a tag of a part with several may end the text, and what follows the first
        one."""
        is_one = bool(part.get("stop_after_first"))
        if _type(part) == "tags_with_separator":
            tag = _either(self._tag(each, False) for each in self._tags(part))
            separator = self._literal(_text(part, "separator", empty=True))
            return False, "" if is_one else f"({separator} {tag})*"
        if is_one:
            return is_last, ""
        if not is_last:
            raise ValueError(TAGS_AT_END)
        free = self._free(_texts(part, "triggers"))
        return False, f"{self._calls_in_text(part, False)}* {free}"

    def _calls_in_text(self, part: Part, is_end: bool) -> str:
        """Text up to a trigger, and one of its tags."""
        triggers, made = _texts(part, "triggers"), list[str]()
        for tag in self._tags(part):
            begin = _text(tag, "begin")
            found = [each for each in triggers if each and begin.startswith(each)]
            if len(found) != 1:
                raise ValueError(f"begin = {shown(begin)} needs one of the triggers at its start")
            head = self._until(found, [each for each in triggers if each not in found])
            more = self._literal(begin[len(found[0]) :])
            made.append(self._rule(f"{head} {more} {self._rest(tag, is_end)}"))
        return _either(made)

    def _separated(self, part: Part, is_last: bool) -> str:
        tags = _either(self._tag(each, False) for each in self._tags(part))
        made = f"({tags} {self._more(part, is_last)[1]})"
        return made if part.get("at_least_one") else f"{made}?"

    def _tags(self, part: Part) -> list[Part]:
        tags = _list(part, "tags")
        if not all(isinstance(each, dict) for each in tags):
            raise ValueError("tags: a list of tags is needed")
        return [{**_known(each, KEYS["tag"]), "type": "tag"} for each in tags]

    def _schema(self, part: Part, is_last: bool) -> str:
        return self._inner(self._of_schema(_value(part, "json_schema")))

    def _lark(self, text: str) -> str:
        return self._inner({"lark_grammar": text})

    def _inner(self, grammar: dict[str, Any]) -> str:
        name = self._names.setdefault(json.dumps(grammar), f"inner_{len(self._grammars)}")
        if name == f"inner_{len(self._grammars)}":
            self._grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _rule(self, body: str, options: str = "", *, is_terminal: bool = False) -> str:
        """The name of a rule, one for all that have the same text."""
        new = f"{'TEXT' if is_terminal else 'part'}_{len(self._rules)}"
        name = self._names.setdefault(f"{new[0]}{options}: {body}", new)
        if name == new:
            self._rules.append(f"{name}{options}: {body}")
        return name


KEYS: Mapping[str, frozenset[str]] = {
    "any_text": frozenset({"excludes"}),
    "const_string": frozenset({"value"}),
    "grammar": frozenset({"grammar"}),
    "json_schema": frozenset({"json_schema"}),
    "optional": frozenset({"content"}),
    "or": frozenset({"elements"}),
    "plus": frozenset({"content"}),
    "reasoning": frozenset({"begin", "end", "ends_at", "section"}),
    "regex": frozenset({"pattern"}),
    "sequence": frozenset({"elements"}),
    "star": frozenset({"content"}),
    "tag": frozenset({"begin", "content", "end"}),
    "tags_with_separator": frozenset({"tags", "separator", "at_least_one", "stop_after_first"}),
    "triggered_tags": frozenset({"triggers", "tags", "at_least_one", "stop_after_first"}),
    "whitespace": frozenset(),
}
# Other keys of xgrammar's that have no effect with these values.
HARMLESS = {"excludes": [], "style": "json", "any_order": False, "syntax": "ebnf"}


def _known(part: Part, keys: frozenset[str]) -> Part:
    for name, value in part.items():
        is_harmless = name in HARMLESS and value == HARMLESS[name]
        if name not in keys and name != "type" and not is_harmless and value is not None:
            raise ValueError(f"{name} = {shown(value)} in a structural tag is not served")
    return part


def _type(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else None


def _heads(part: Any) -> list[str]:
    """The literals that a part begins with; empty unless it always begins with one."""
    found = list[str]()
    if _type(part) in ("const_string", "tag"):
        found = [str(part.get("value") or part.get("begin") or "")]
    elif _type(part) == "plus":
        found = _heads(part.get("content"))
    elif _type(part) == "or":
        each_heads = [_heads(each) for each in _list(part, "elements")]
        found = [each for own in each_heads for each in own] if all(each_heads) else []
    known = list(filter(None, dict.fromkeys(found)))
    return [each for each in known if not any(each != o and each.startswith(o) for o in known)]


def _texts(part: Part, name: str) -> list[str]:
    """A list of texts that are not empty."""
    value = part.get(name) or []
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"{name} = {shown(value)}: a list of texts is needed")
    return value


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
