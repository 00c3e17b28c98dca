"""A budget of reasoning: after so many generated tokens of a section its closer is forced, token by
token. Where a text stands is a function of the text, so forced tokens are masks of rows, as those
of grammars are.

Markers are tokens, or text that tokens write together. A text is read as a string of symbols, each
of them a byte, or a token that markers name or that writes no bytes."""

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
BLANK = " \t\r\n"
FIRST_TOKEN = 256  # the symbol of token 0; those before are bytes


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
    """Where a text stands. section: `over` if no further one follows. num_tokens: of the section.
    end: the last symbols, of this section or before it."""

    section: str
    num_tokens: int = 0
    end: str = ""


class Sections:
    """Finds sections token by token, and their forced ends. Raises ValueError for a closer that no
    tokens write."""

    def __init__(self, budget: Budget, bytes_of_tokens: Callable[[], Mapping[int, bytes]]) -> None:
        markers = [budget.opener, *budget.closers]
        parts = {part for marker in markers for part in marker}
        self._budget = budget
        self._ids = {part for part in parts if isinstance(part, int)}
        self._bytes = bytes_of_tokens() if self._ids < parts else {}
        self._opener, *closers = map(_symbols, markers)
        self._closers, self._next = tuple(closers), self._tokens_of(closers[0])
        self._longest = max(map(len, (self._opener, *closers)))
        self._outside = "over" if budget.has_grammar else "undecided"  # after a section
        self.start = Place(self._outside if budget.section == "over" else budget.section)

    def after(self, place: Place, token: int) -> Place:
        section, num_tokens, end = place
        text = None if token in self._ids else self._bytes.get(token)
        for symbol in _symbols([token]) if text is None else text.decode("latin-1"):
            end = (end + symbol)[-self._longest :]
            if section == "inside" and end.endswith(self._closers):
                section, num_tokens, end = self._outside, 0, ""
            elif section == "undecided" and end.endswith(self._opener):
                section, num_tokens, end = "inside", 0, ""
            elif section == "undecided" and self._budget.has_grammar:
                is_begun = self._opener.startswith(end.lstrip(BLANK))
                section = section if is_begun else "over"
        return Place(section, num_tokens + (place.section == section == "inside"), end)

    def forced(self, place: Place) -> int | None:
        """The only token that may follow, if one is forced."""
        if place.section != "inside" or place.num_tokens < self._budget.num_tokens:
            return None
        closer = self._closers[0]
        lengths = range(len(closer), -1, -1)
        return self._next[next(n for n in lengths if place.end.endswith(closer[:n]))]

    def _tokens_of(self, closer: str) -> list[int]:
        """The next token after each beginning of the closer: the longest that writes no more."""
        text = closer.encode("latin-1", "ignore")
        tokens = {_symbols([token]): token for token in self._ids}
        for token, own in self._bytes.items():
            if own and own in text and token not in self._ids:
                tokens[own.decode("latin-1")] = token
        fitting = [
            [each for each in tokens if closer.startswith(each, start)]
            for start in range(len(closer))
        ]
        if not all(fitting):
            raise ValueError(
                f"thinking_token_budget = {self._budget.num_tokens}: the vocabulary has no "
                "tokens that write the end of reasoning"
            )
        return [tokens[max(each, key=len)] for each in fitting]


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
        grammar = self._grammar
        return NO_TOKEN_ERROR if grammar is None else grammar.why_no_token(tokens, prompt_len)

    def better_drafts(self, drafts: list[int], max_drafts: int) -> list[int]:
        """As `GrammarState.better_drafts`. After a forced token that was not drafted only forced
        ones are."""
        place, made = self._place, list[int]()
        while len(made) < max_drafts:
            token = self._sections.forced(place)
            if token is None and len(made) == len(drafts):
                break
            if token is None:
                token = drafts[len(made)]
            elif drafts[len(made) : len(made) + 1] != [token]:
                drafts = [*made, token]
            made.append(token)
            place = self._sections.after(place, token)
        return made if self._grammar is None else self._grammar.better_drafts(made, max_drafts)


TextRules = GrammarState | ThinkingBudget
"""What a request's text must follow."""


def _symbols(marker: Marker) -> str:
    return "".join(
        chr(FIRST_TOKEN + part) if isinstance(part, int) else part.encode().decode("latin-1")
        for part in marker
    )
