"""The deterministic automaton of a set of texts: one state for each derivative."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from tllm_spec.grammar.characters import ALL, Ranges, common, united
from tllm_spec.grammar.text_sets import Term, TextSets

MAX_STATES = 4096
TOO_MANY = f"it needs more than {MAX_STATES} states"


@dataclass(frozen=True)
class State:
    """moves: by the state that follows, the characters that lead to it."""

    is_end: bool
    moves: Mapping[Term, Ranges]


def states_of(sets: TextSets, term: Term) -> dict[Term, State]:
    """Those from which a text can end, the first one first; empty for a set without texts. Raises
    ValueError for more than `MAX_STATES`."""
    classes = _classes(sets, term)
    states: dict[Term, State] = {}
    waiting = [term]
    while waiting:
        now = waiting.pop()
        if now in states:
            continue
        moves: dict[Term, Ranges] = {}
        for ranges in classes:
            following = sets.derivative(now, ranges[0][0])
            if following != sets.nothing:
                moves[following] = united((*moves.get(following, ()), *ranges))
        states[now] = State(sets.has_empty(now), moves)
        waiting += moves
        if len(states) > MAX_STATES:
            raise ValueError(TOO_MANY)
    return _alive(states)


def has_texts(sets: TextSets, term: Term) -> bool:
    """Raises ValueError for an intersection or a complement that needs too many states."""
    if all(node.kind not in ("all_of", "not") for node in sets.nodes_of(term)):
        return term != sets.nothing
    return bool(states_of(sets, term))


def holds(sets: TextSets, term: Term, text: str) -> bool:
    """Whether the text is in the set."""
    for character in text:
        term = sets.derivative(term, ord(character))
    return sets.has_empty(term)


def _classes(sets: TextSets, term: Term) -> list[Ranges]:
    """All characters, so that those of a class are in the same sets of the term's nodes."""
    ranges_of = {node.ranges for node in sets.nodes_of(term) if node.kind == "characters"}
    bounds = sorted(
        {bound for ranges in ranges_of for low, high in ranges for bound in (low, high + 1)}
    )
    spans = zip([0, *bounds], [*bounds, ALL[-1][1] + 1], strict=True)
    starts = {ranges: [low for low, _ in ranges] for ranges in ranges_of}
    classes: dict[tuple[Ranges, ...], list[tuple[int, int]]] = {}
    for start, end in spans:
        if start < end:
            containing = tuple(each for each in ranges_of if _holds(each, starts[each], start))
            classes.setdefault(containing, []).append((start, end - 1))
    found = [common(united(spans_of), ALL) for spans_of in classes.values()]
    return [each for each in found if each]


def _holds(ranges: Ranges, starts: list[int], character: int) -> bool:
    index = bisect_right(starts, character) - 1
    return index >= 0 and character <= ranges[index][1]


def _alive(states: dict[Term, State]) -> dict[Term, State]:
    """Those from which a text can end, with the moves between them."""
    before: dict[Term, list[Term]] = {}
    for term, state in states.items():
        for following in state.moves:
            before.setdefault(following, []).append(term)
    waiting = [term for term, state in states.items() if state.is_end]
    alive = set(waiting)
    while waiting:
        new = set(before.get(waiting.pop(), ())) - alive
        alive |= new
        waiting += new
    return {
        term: State(state.is_end, {to: each for to, each in state.moves.items() if to in alive})
        for term, state in states.items()
        if term in alive
    }
