"""Sets of texts as terms, closed under intersection and complement, and their derivatives
(Brzozowski, Derivatives of Regular Expressions, J. ACM 11, 1964)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tllm_spec.grammar.characters import ALL, Ranges, common, united

Term = int  # the number of a node in its table


@dataclass(frozen=True)
class Node:
    """characters: a text of one of `ranges`. sequence: the first part, then the second one.
    repeat: the part, `low` to `high` times; None is any number."""

    kind: Literal["characters", "empty", "sequence", "any_of", "all_of", "not", "repeat"]
    parts: tuple[Term, ...] = ()
    ranges: Ranges = ()
    low: int = 0
    high: int | None = None


class TextSets:
    """A table of nodes. Equal nodes have one term; the same set may have several."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._terms: dict[Node, Term] = {}
        self._with_empty: list[bool] = []
        self._derivatives: dict[tuple[Term, int], Term] = {}
        self.nothing = self.characters(())  # no text at all
        self.empty = self._term(Node("empty"), True)  # the empty text
        self.anything = self.repeat(self.characters(ALL))

    def has_empty(self, term: Term) -> bool:
        """Whether the empty text is in the set."""
        return self._with_empty[term]

    def characters(self, ranges: Ranges) -> Term:
        return self._term(Node("characters", ranges=ranges), False)

    def text(self, text: str) -> Term:
        return self.sequence([self.characters(((ord(each), ord(each)),)) for each in text])

    def sequence(self, parts: Sequence[Term]) -> Term:
        whole = self.empty
        for part in reversed(parts):
            whole = self._pair(part, whole)
        return whole

    def any_of(self, options: Sequence[Term]) -> Term:
        members = self._members("any_of", options, neutral=self.nothing)
        if self.anything in members:
            return self.anything
        members = self._with_one_set_of_characters(members)
        if len(members) < 2:
            return members[0] if members else self.nothing
        return self._term(Node("any_of", members), any(map(self.has_empty, members)))

    def all_of(self, parts: Sequence[Term]) -> Term:
        members = self._members("all_of", parts, neutral=self.anything)
        if self.nothing in members:
            return self.nothing
        if len(members) < 2:
            return members[0] if members else self.anything
        if all(self.nodes[each].kind == "characters" for each in members):
            ranges = ALL
            for each in members:
                ranges = common(ranges, self.nodes[each].ranges)
            return self.characters(ranges)
        return self._term(Node("all_of", members), all(map(self.has_empty, members)))

    def outside(self, term: Term) -> Term:
        """The texts that are not in the set."""
        node = self.nodes[term]
        if node.kind == "not":
            return node.parts[0]
        if term in (self.nothing, self.anything):
            return self.anything if term == self.nothing else self.nothing
        return self._term(Node("not", (term,)), not self.has_empty(term))

    def repeat(self, term: Term, low: int = 0, high: int | None = None) -> Term:
        if high == 0 or term == self.empty:
            return self.empty
        if term == self.nothing:
            return self.nothing if low else self.empty
        if (low, high) == (1, 1):
            return term
        node = Node("repeat", (term,), low=low, high=high)
        return self._term(node, low == 0 or self.has_empty(term))

    def derivative(self, term: Term, character: int) -> Term:
        """What may follow the character in a text of the set."""
        key = term, character
        if key not in self._derivatives:
            self._derivatives[key] = self._derive(self.nodes[term], character)
        return self._derivatives[key]

    def nodes_of(self, term: Term) -> Iterator[Node]:
        """The nodes of which the term is made, each once."""
        waiting, seen = [term], {term}
        while waiting:
            node = self.nodes[waiting.pop()]
            yield node
            new = set(node.parts) - seen
            seen |= new
            waiting += new

    def parts_of(self, term: Term) -> list[Term]:
        """The parts of a sequence; another term is its own only part."""
        parts = []
        while self.nodes[term].kind == "sequence":
            first, term = self.nodes[term].parts
            parts.append(first)
        return [*parts, term]

    def _derive(self, node: Node, character: int) -> Term:
        if node.kind == "characters":
            is_in = any(low <= character <= high for low, high in node.ranges)
            return self.empty if is_in else self.nothing
        if node.kind == "empty":
            return self.nothing
        first = self.derivative(node.parts[0], character)
        if node.kind == "not":
            return self.outside(first)
        if node.kind == "repeat":
            high = None if node.high is None else node.high - 1
            return self._pair(first, self.repeat(node.parts[0], max(node.low - 1, 0), high))
        if node.kind == "sequence":
            both = self._pair(first, node.parts[1])
            if not self.has_empty(node.parts[0]):
                return both
            return self.any_of([both, self.derivative(node.parts[1], character)])
        made = [first, *(self.derivative(each, character) for each in node.parts[1:])]
        return self.any_of(made) if node.kind == "any_of" else self.all_of(made)

    def _pair(self, first: Term, second: Term) -> Term:
        if self.nothing in (first, second):
            return self.nothing
        if self.empty in (first, second):
            return second if first == self.empty else first
        node = self.nodes[first]
        if node.kind == "sequence":
            return self._pair(node.parts[0], self._pair(node.parts[1], second))
        has_empty = self.has_empty(first) and self.has_empty(second)
        return self._term(Node("sequence", (first, second)), has_empty)

    def _members(
        self, kind: Literal["any_of", "all_of"], terms: Sequence[Term], neutral: Term
    ) -> tuple[Term, ...]:
        """The members of a union or intersection, with nested ones of the same kind flattened."""
        found: set[Term] = set()
        for term in terms:
            node = self.nodes[term]
            found |= set(node.parts) if node.kind == kind else {term}
        return tuple(sorted(found - {neutral}))

    def _with_one_set_of_characters(self, members: tuple[Term, ...]) -> tuple[Term, ...]:
        single = [each for each in members if self.nodes[each].kind == "characters"]
        if len(single) < 2:
            return members
        both = self.characters(united(span for each in single for span in self.nodes[each].ranges))
        return tuple(sorted({both, *(set(members) - set(single))}))

    def _term(self, node: Node, has_empty: bool) -> Term:
        if node not in self._terms:
            self._terms[node] = len(self.nodes)
            self.nodes.append(node)
            self._with_empty.append(has_empty)
        return self._terms[node]
