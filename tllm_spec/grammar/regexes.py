"""From a regular expression to the set of its texts, read by the parser of Python's `re`.

Where ECMA-262 and Python differ (`\\s`, `\\w`, `\\d` and `.` beyond ASCII), the set has the texts
that match by both."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from importlib import import_module
from typing import Any

from tllm_spec.grammar.characters import ALL, Ranges, common, of_text, other, united
from tllm_spec.grammar.text_sets import Term, TextSets
from tllm_spec.grammar.text_states import has_texts

# Python 3.10 has it under its older name.
_has_new_name = hasattr(re, "_parser")
_parser: Any = import_module("re._parser" if _has_new_name else "sre_parse")
_codes: Any = import_module("re._constants" if _has_new_name else "sre_constants")

NAMES = {
    "GROUPREF": "a reference to a group",
    "GROUPREF_EXISTS": "a condition on a group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive quantifier",
}
LOOK_AHEAD = "look-ahead inside a group is only supported where the group ends the expression"
LOOK_BEHIND = "look-behind is only supported where its group begins the expression, and not behind \
look-ahead"
MAX_COUNT = 1 << 16
Item = tuple[Any, Any]


class Edge(Enum):
    """What comes next to a part of an expression, on its left or its right."""

    INSIDE = "more of the expression"
    TEXT = "the end of the text"
    OPEN = "any text, unless an anchor stands here"


def whole_texts(sets: TextSets, expression: str) -> Term:
    """Texts that match from their first to their last character. Raises ValueError for what is not
    served."""
    return _Reader(sets, is_wide=False).sequence(_parsed(expression), Edge.TEXT, Edge.TEXT)


def texts_with_match(sets: TextSets, expression: str) -> Term:
    """Texts in which the expression matches somewhere, as `pattern` of a JSON schema means it.
    Raises ValueError for what is not served."""
    return _Reader(sets, is_wide=False).sequence(_parsed(expression), Edge.OPEN, Edge.OPEN)


def _parsed(expression: str) -> Sequence[Item]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that may change its meaning
            parsed = _parser.parse(expression)
    except (re.error, OverflowError) as error:
        raise ValueError(f"it is no regular expression: {error}") from error
    if parsed.state.flags & ~re.UNICODE:
        raise ValueError("flags such as (?i) are not supported")
    return list(parsed)


class _Reader:
    """Builds the set of a parsed expression. is_wide: it has the texts that match by either of the
    two meanings, as needed for a complement, not only those that match by both."""

    def __init__(self, sets: TextSets, *, is_wide: bool) -> None:
        self._sets = sets
        self._is_wide = is_wide

    def sequence(self, items: Sequence[Item], left: Edge, right: Edge) -> Term:
        """The set of the items one after the other."""
        items, left = _without_anchor(list(items), left, is_first=True)
        items, right = _without_anchor(items, right, is_first=False)
        if left is Edge.OPEN and not (items and _is_group(items[0])):
            parts, left_of_first = [self._sets.anything], Edge.INSIDE
        else:
            parts, left_of_first = [], left
        open_end = right is Edge.OPEN and not (items and _is_group(items[-1]))
        for index, (code, value) in enumerate(items):
            edges = (
                left_of_first if index == 0 else Edge.INSIDE,
                right if index == len(items) - 1 and not open_end else Edge.INSIDE,
            )
            if code in (_codes.ASSERT, _codes.ASSERT_NOT):
                direction, inner = value
                is_not = code is _codes.ASSERT_NOT
                if direction > 0:
                    here = Edge.INSIDE if parts else left
                    rest = self.sequence(items[index + 1 :], here, right)
                    ahead = self._seen_ahead(inner, is_not, here, right)
                    return self._sets.sequence([*parts, self._both(ahead, rest)])
                behind = self._seen_behind(inner, is_not, left)
                parts = [self._both(behind, self._sets.sequence(parts))]
            else:
                parts.append(self._item(code, value, *edges))
        return self._sets.sequence([*parts, self._sets.anything] if open_end else parts)

    def _seen_ahead(self, inner: Sequence[Item], is_not: bool, here: Edge, right: Edge) -> Term:
        """The texts that may follow a look-ahead."""
        if right is Edge.INSIDE:
            raise ValueError(LOOK_AHEAD)
        left = Edge.TEXT if here is Edge.TEXT else Edge.INSIDE
        return self._seen(inner, is_not, left, Edge.OPEN)

    def _seen_behind(self, inner: Sequence[Item], is_not: bool, left: Edge) -> Term:
        """The texts that may come before a look-behind."""
        if left is Edge.INSIDE:
            raise ValueError(LOOK_BEHIND)
        return self._seen(inner, is_not, Edge.OPEN, Edge.INSIDE)

    def _seen(self, inner: Sequence[Item], is_not: bool, left: Edge, right: Edge) -> Term:
        reader = _Reader(self._sets, is_wide=self._is_wide is not is_not)
        seen = reader.sequence(inner, left, right)
        return self._sets.outside(seen) if is_not else seen

    def _both(self, seen: Term, term: Term) -> Term:
        both = self._sets.all_of([seen, term])
        return both if has_texts(self._sets, both) else self._sets.nothing

    def _item(self, code: Any, value: Any, left: Edge, right: Edge) -> Term:
        sets = self._sets
        if code is _codes.SUBPATTERN:
            _, added, removed, inner = value
            if added or removed:
                raise ValueError("flags such as (?i:...) are not supported")
            return self.sequence(inner, left, right)
        if code is _codes.BRANCH:
            return sets.any_of([self.sequence(each, left, right) for each in value[1]])
        if code in (_codes.MAX_REPEAT, _codes.MIN_REPEAT):
            low, high, inner = value
            bounds = int(low), None if high is _codes.MAXREPEAT else int(high)
            if max(each or 0 for each in bounds) > MAX_COUNT:
                raise ValueError(f"a repetition of more than {MAX_COUNT} times is not supported")
            return sets.repeat(self.sequence(inner, Edge.INSIDE, Edge.INSIDE), *bounds)
        if code is _codes.AT:
            raise ValueError(f"{_anchor(value)} is not supported")
        return sets.characters(self._ranges(code, value))

    def _ranges(self, code: Any, value: Any) -> Ranges:
        if code is _codes.LITERAL:
            return _checked(value, value)
        if code is _codes.NOT_LITERAL:
            return other(_checked(value, value))
        if code is _codes.ANY:
            return other(of_text("\n" if self._is_wide else "\n\r\u2028\u2029"))
        if code is not _codes.IN:
            raise ValueError(f"{NAMES.get(str(code), str(code))} is not supported")
        is_negated = value[0][0] is _codes.NEGATE
        found: list[tuple[int, int]] = []
        for kind, each in value[is_negated:]:
            if kind is _codes.CATEGORY:
                found += _category(str(each), is_wide=self._is_wide is not is_negated)
            else:
                found += _checked(*((each, each) if kind is _codes.LITERAL else each))
        return other(united(found)) if is_negated else united(found)


def _is_group(item: Item) -> bool:
    return item[0] in (_codes.SUBPATTERN, _codes.BRANCH)


def _without_anchor(items: list[Item], edge: Edge, *, is_first: bool) -> tuple[list[Item], Edge]:
    """The items without an anchor at an end of the expression, and the edge there: with an anchor
    the end of the text."""
    index = 0 if is_first else -1
    wanted = (
        (_codes.AT_BEGINNING, _codes.AT_BEGINNING_STRING)
        if is_first
        else (_codes.AT_END, _codes.AT_END_STRING)
    )
    while edge is not Edge.INSIDE and items and items[index][0] is _codes.AT:
        if items[index][1] not in wanted:
            break
        del items[index]
        edge = Edge.TEXT
    return items, edge


def _anchor(code: Any) -> str:
    if "BOUNDARY" in str(code):
        return "a word boundary"
    return "^ or $ in the middle of the expression"


def _checked(low: int, high: int) -> Ranges:
    if low == high and 0xD800 <= low <= 0xDFFF:
        raise ValueError("half of a surrogate pair is not supported")
    return common(((low, high),), ALL)


@lru_cache(maxsize=16)
def _category(name: str, *, is_wide: bool) -> Ranges:
    """Characters that are in the category by both meanings, or, if `is_wide`, by either."""
    kind = name.rpartition("_")[2]
    if "_NOT_" in name:
        return other(_category(f"CATEGORY_{kind}", is_wide=not is_wide))
    ascii_letter = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[kind]
    if not is_wide:
        return of_text("".join(re.findall(ascii_letter, "".join(map(chr, range(128))), re.ASCII)))
    characters = "".join(chr(each) for low, high in ALL for each in range(low, high + 1))
    more = "\ufeff" if kind == "SPACE" else ""  # white space by ECMA-262 only
    return of_text("".join(re.findall(ascii_letter, characters)) + more)
