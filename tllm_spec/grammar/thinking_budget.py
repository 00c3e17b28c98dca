"""A budget of reasoning: after so many generated tokens of a section its closer is forced, token by
token. Where a text stands is a function of the text, so forced tokens are masks of rows, as those
of grammars are.

Markers are tokens, or text that tokens write together. A token is read as symbols: its bytes, or
-1 - id where markers name it or it writes no bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.grammar.guided_decoding import GrammarSource
from tllm_spec.request_errors import NO_TOKEN_ERROR

if TYPE_CHECKING:
    from torch import Tensor

Marker = Sequence[str | int]
"""Texts and ids of tokens that follow each other."""
Symbols = tuple[int, ...]
BLANK = frozenset(b" \t\r\n")


@dataclass(frozen=True)
class Budget:
    """What a request's forced ends depend on. section: how the answer begins, a `Section`.
    has_grammar: of the text after the section, which then has no second one, and begins with its
    opener if it has any."""

    num_tokens: int
    opener: Marker
    closers: Sequence[Marker]
    """The first one is forced; each ends a section."""
    section: str
    has_grammar: bool

    def source(self, grammar: GrammarSource | None) -> GrammarSource:
        """The budget and a grammar as text."""
        inner = None if grammar is None else [grammar.kind, grammar.text]
        return GrammarSource("thinking_budget", json.dumps([vars(self), inner]))

    @classmethod
    def of(cls, source: GrammarSource) -> tuple[Budget, GrammarSource | None]:
        """What `source` was made of."""
        own, inner = json.loads(source.text)
        return cls(**own), inner and GrammarSource(*inner)


class Place(NamedTuple):
    """Where a text stands: how much of the opener or of each closer its end is, and how many
    tokens of the section it has. is_over: there is no further section."""

    is_inside: bool
    is_over: bool
    num_tokens: int
    matched: tuple[int, ...]


class Sections:
    """Finds sections token by token, and their forced ends. Raises ValueError for a closer that no
    tokens write."""

    def __init__(self, budget: Budget, bytes_of_tokens: Callable[[], Mapping[int, bytes]]) -> None:
        markers = [budget.opener, *budget.closers]
        parts = [part for marker in markers for part in marker]
        self._budget = budget
        self._ids = {part for part in parts if isinstance(part, int)}
        self._bytes = bytes_of_tokens() if len(self._ids) < len(set(parts)) else {}
        self._opener, *self._closers = map(_symbols, markers)
        self._next = self._tokens_of(self._closers[0])
        is_over = budget.has_grammar and budget.section == "over"
        self.start = self._begun(is_inside=budget.section == "inside", is_over=is_over)

    def after(self, place: Place, token: int) -> Place:
        was_inside = place.is_inside
        plain = self._bytes.get(token)
        is_text = plain is not None and token not in self._ids
        for symbol in plain if plain is not None and is_text else (-1 - token,):
            if place.is_inside:
                place = self._inside(place, symbol)
            elif not place.is_over:
                place = self._outside(place, symbol)
        if was_inside and place.is_inside:
            return place._replace(num_tokens=place.num_tokens + 1)
        return place

    def forced(self, place: Place) -> int | None:
        """The only token that may follow, if one is forced."""
        if not place.is_inside or place.num_tokens < self._budget.num_tokens:
            return None
        return self._next[place.matched[0]]

    def _inside(self, place: Place, symbol: int) -> Place:
        pairs = zip(self._closers, place.matched, strict=True)
        matched = tuple(_advanced(closer, number, symbol) for closer, number in pairs)
        if any(map(int.__eq__, matched, map(len, self._closers))):
            return self._begun(is_inside=False, is_over=self._budget.has_grammar)
        return place._replace(matched=matched)

    def _outside(self, place: Place, symbol: int) -> Place:
        (before,) = place.matched
        number = _advanced(self._opener, before, symbol)
        if number == len(self._opener):
            return self._begun(is_inside=True)
        is_first = number == before + 1 or (not before and symbol in BLANK)
        is_over = self._budget.has_grammar and not is_first
        return place._replace(is_over=is_over, matched=(number,))

    def _begun(self, *, is_inside: bool, is_over: bool = False) -> Place:
        return Place(is_inside, is_over, 0, (0,) * (len(self._closers) if is_inside else 1))

    def _tokens_of(self, closer: Symbols) -> list[int]:
        """The next token after each beginning of the closer: the longest that writes no more."""
        text = bytes(symbol for symbol in closer if symbol >= 0)
        fitting = {own: token for token, own in self._bytes.items() if own and own in text}
        found = list[int]()
        for start, symbol in enumerate(closer):
            ends = range(len(closer), start, -1)
            parts = [closer[start:end] for end in ends if min(closer[start:end]) >= 0]
            tokens = [fitting[bytes(part)] for part in parts if bytes(part) in fitting]
            if symbol >= 0 and not tokens:
                raise ValueError(
                    f"thinking_token_budget = {self._budget.num_tokens}: the vocabulary has no "
                    "tokens that write the end of reasoning"
                )
            found.append(-1 - symbol if symbol < 0 else tokens[0])
        return found


class ThinkingBudget:
    """A request's place in its sections, and in its grammar, if it has one: with the interface of
    `GrammarState`."""

    def __init__(
        self, source: GrammarSource, sections: Sections, grammar: GrammarState | None
    ) -> None:
        self.source = source
        self._sections, self._grammar = sections, grammar
        self._place, self._num_read = sections.start, 0

    def read(self, tokens: list[int], prompt_len: int) -> None:
        """As `GrammarState.read`."""
        for token in tokens[prompt_len + self._num_read :]:
            self._place = self._sections.after(self._place, token)
        self._num_read = len(tokens) - prompt_len
        if self._grammar is not None:
            self._grammar.read(tokens, prompt_len)

    def fill(
        self, tokens: Sequence[int], parents: Sequence[int], bitmask: Tensor
    ) -> Mapping[int, int]:
        """As `GrammarState.fill`. A grammar that excludes the forced token, in the middle of a
        character, comes first."""
        if self._grammar is not None:
            self._grammar.fill(tokens, parents, bitmask)
        places = {0: self._place}
        for node in range(1, len(tokens)):
            if (before := places.get(parents[node])) is not None:
                places[node] = self._sections.after(before, tokens[node])
        forced, rows = dict[int, int](), bitmask.numpy()
        for node, place in places.items():
            token = self._sections.forced(place)
            if token is not None and rows[node, token >> 5] >> (token & 31) & 1:
                forced[node] = token
        return forced

    def why_no_token(self, tokens: list[int], prompt_len: int) -> str | None:
        """As `GrammarState.why_no_token`."""
        if self._grammar is None:
            return NO_TOKEN_ERROR
        return self._grammar.why_no_token(tokens, prompt_len)

    def better_drafts(self, drafts: list[int], max_drafts: int) -> list[int]:
        """As `GrammarState.better_drafts`. After a forced token that was not drafted only forced
        ones are."""
        place, made, left = self._place, list[int](), [*drafts[:max_drafts]]
        while len(made) < max_drafts:
            token = self._sections.forced(place)
            if token is None and len(made) == len(left):
                break
            if token is None:
                token = left[len(made)]
            elif len(made) == len(left) or left[len(made)] != token:
                left = [*made, token]
            made.append(token)
            place = self._sections.after(place, token)
        return made if self._grammar is None else self._grammar.better_drafts(made, max_drafts)


TextRules = GrammarState | ThinkingBudget
"""What a request's text must follow."""


def _symbols(marker: Marker) -> Symbols:
    found = list[int]()
    for part in marker:
        found += [-1 - part] if isinstance(part, int) else part.encode()
    return tuple(found)


def _advanced(marker: Symbols, matched: int, symbol: int) -> int:
    """How much of the marker the text ends with after one more symbol."""
    if marker[matched] == symbol:
        return matched + 1
    text = (*marker[:matched], symbol)
    return next(n for n in range(matched, -1, -1) if marker[:n] == text[len(text) - n :])
