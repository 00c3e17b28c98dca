"""Sets of texts as rules of xgrammar's EBNF, as they are or as the inside of JSON strings."""

from __future__ import annotations

import json

from tllm_spec.grammar.characters import ALL, Ranges, common, of_text, other
from tllm_spec.grammar.text_sets import Node, Term, TextSets
from tllm_spec.grammar.text_states import states_of

CONTROLS = "".join(map(chr, range(32)))
PLAIN = other(of_text(CONTROLS + '"\\'))  # what JSON strings have without an escape
NO_TEXT = "no text matches it"


class TextRules:
    """Rules with names that begin with `prefix`. is_json: characters are escaped as JSON strings
    need it, in one way each."""

    def __init__(self, sets: TextSets, prefix: str, *, is_json: bool) -> None:
        self._sets = sets
        self._prefix = prefix
        self._is_json = is_json
        self._rules: dict[str, str] = {}
        self._names: dict[Ranges, str] = {}  # of rules for characters

    @property
    def text(self) -> str:
        return "".join(f"{name} ::= {body}\n" for name, body in self._rules.items())

    def add(self, name: str, term: Term) -> None:
        """A rule for the set. Raises ValueError for one without texts, and for a part with more
        states than are served."""
        self._rules[name] = self._written(term)

    def _written(self, term: Term) -> str:
        node = self._sets.nodes[term]
        if node.kind in ("all_of", "not"):
            return self._by_states(term)
        if term == self._sets.nothing:
            raise ValueError(NO_TEXT)
        if node.kind == "empty":
            return '""'
        if node.kind == "characters":
            return self._characters(node.ranges)
        if node.kind == "sequence":
            return self._sequence(self._sets.parts_of(term))
        if node.kind == "any_of":
            return "(" + " | ".join(map(self._written, node.parts)) + ")"
        return f"({self._written(node.parts[0])}){_count(node)}"

    def _sequence(self, parts: list[Term]) -> str:
        """Neighbouring characters become one text."""
        written: list[str] = []
        text = ""
        for part in parts:
            one = self._only_character(part)
            if one is not None:
                text += one
                continue
            written += [_quoted(text)] * bool(text) + [self._written(part)]
            text = ""
        return " ".join(written + [_quoted(text)] * bool(text))

    def _only_character(self, term: Term) -> str | None:
        node = self._sets.nodes[term]
        if node.kind != "characters" or len(node.ranges) != 1:
            return None
        ((low, high),) = node.ranges
        return self._escaped(chr(low)) if low == high else None

    def _escaped(self, character: str) -> str:
        return (
            json.dumps(character, ensure_ascii=character in CONTROLS)[1:-1]
            if self._is_json
            else character
        )

    def _characters(self, ranges: Ranges) -> str:
        """Each set of characters is one rule."""
        if ranges not in self._names:
            name = f"{self._prefix}_characters_{len(self._names)}"
            plain = common(ranges, PLAIN if self._is_json else ALL)
            options = [_class(plain)] if plain else []
            rest = common(ranges, other(PLAIN)) if self._is_json else ()
            options += [
                _quoted(self._escaped(chr(each)))
                for low, high in rest
                for each in range(low, high + 1)
            ]
            self._names[ranges] = name
            self._rules[name] = " | ".join(options)
        return self._names[ranges]

    def _by_states(self, term: Term) -> str:
        """A rule for each state."""
        states = states_of(self._sets, term)
        if not states:
            raise ValueError(NO_TEXT)
        start = len(self._rules)
        names = {each: f"{self._prefix}_{start}_{index}" for index, each in enumerate(states)}
        for each, state in states.items():
            options = ['""'] * state.is_end
            options += [
                f"{self._characters(ranges)} {names[to]}" for to, ranges in state.moves.items()
            ]
            self._rules[names[each]] = " | ".join(options)
        return names[term]


def _count(node: Node) -> str:
    if (node.low, node.high) == (0, None):
        return "*"
    return f"{{{node.low},{'' if node.high is None else node.high}}}"


def _quoted(text: str) -> str:
    return '"' + "".join(map(_code, text)) + '"'


def _class(ranges: Ranges) -> str:
    spans = (
        _code(chr(low)) + (f"-{_code(chr(high))}" if high > low else "") for low, high in ranges
    )
    return f"[{''.join(spans)}]"


def _code(character: str) -> str:
    """The character in EBNF."""
    if character.isascii() and character.isalnum():
        return character
    return f"\\U{ord(character):08x}"
