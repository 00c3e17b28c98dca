"""How long the texts of a set are, and those of a set that have a length."""

from __future__ import annotations

from math import isqrt

from tllm_spec.grammar.characters import ALL
from tllm_spec.grammar.text_sets import Node, Term, TextSets
from tllm_spec.grammar.text_states import TOO_MANY, states_of

MAX_STATES_OF_LENGTH = 128  # xgrammar takes milliseconds for each
Span = tuple[int, int | None]  # least and most characters; None is any number


def of_length(sets: TextSets, term: Term, low: int, high: int | None) -> Term:
    """Texts of the set with `low` to `high` characters. Where these would need too many states,
    some with at most `high`: each unbounded repetition gets a bound. Raises ValueError if neither
    is possible."""
    least, most = span_of(sets, term)
    low = low if low > least else 0
    high = high if high is not None and (most is None or most > high) else None
    if not low and high is None:
        return term
    node = sets.nodes[term]
    if node.kind == "repeat" and sets.nodes[node.parts[0]].kind == "characters":
        highs = [each for each in (high, node.high) if each is not None]
        low, high = max(low, node.low), min(highs, default=None)
        return (
            sets.nothing
            if high is not None and high < low
            else sets.repeat(node.parts[0], low, high)
        )
    exact = sets.all_of([term, sets.repeat(sets.characters(ALL), low, high)])
    if low or high is None:
        return exact if states_of(sets, exact) else sets.nothing
    try:
        if len(states := states_of(sets, exact)) <= MAX_STATES_OF_LENGTH:
            return exact if states else sets.nothing
    except ValueError:
        return _within(sets, term, high)
    try:
        return _within(sets, term, high)
    except ValueError:
        return exact


def span_of(sets: TextSets, term: Term) -> Span:
    """Nothing is known of an intersection or a complement."""
    node = sets.nodes[term]
    if node.kind == "characters":
        return 1, 1
    if node.kind == "empty":
        return 0, 0
    if node.kind == "repeat":
        least, most = span_of(sets, node.parts[0])
        unbounded = node.high is None or most is None
        return least * node.low, None if unbounded else most * node.high  # type: ignore[operator]
    if node.kind in ("all_of", "not"):
        return 0, None
    spans = [
        span_of(sets, each)
        for each in (sets.parts_of(term) if node.kind == "sequence" else node.parts)
    ]
    mosts = [most for _, most in spans]
    total = sum if node.kind == "sequence" else max
    lasts = [each for each in mosts if each is not None]
    first = sum if node.kind == "sequence" else min
    return first(least for least, _ in spans), total(lasts) if len(lasts) == len(mosts) else None


def _within(sets: TextSets, term: Term, room: int) -> Term:
    """Some of the texts that have at most `room` characters."""
    least, most = span_of(sets, term)
    if most is not None and most <= room:
        return term
    node = sets.nodes[term]
    if least > room:
        return sets.nothing
    if node.kind in ("all_of", "not"):
        raise ValueError(TOO_MANY)
    if node.kind == "any_of":
        return sets.any_of([_within(sets, each, room) for each in node.parts])
    if node.kind == "sequence":
        return _sequence_within(sets, sets.parts_of(term), room)
    assert node.kind == "repeat", "the other kinds have bounds, or were refused by their span"
    return _repeat_within(sets, node, room)


def _repeat_within(sets: TextSets, node: Node, room: int) -> Term:
    part = node.parts[0]
    least, most = span_of(sets, part)
    high = room if node.high is None else node.high
    # Parts without a bound of their own share the room.
    high = min(
        high, room // most if most else max(node.low, min(isqrt(room), room // max(least, 1)))
    )
    if high < max(node.low, 1):
        return sets.nothing if node.low else sets.empty
    return sets.repeat(part if most else _within(sets, part, room // high), node.low, high)


def _sequence_within(sets: TextSets, parts: list[Term], room: int) -> Term:
    """Each part gets an equal share of what the least lengths leave."""
    spans = [span_of(sets, each) for each in parts]
    spare = room - sum(least for least, _ in spans)
    made = []
    num_open = sum(most != least for least, most in spans)
    for part, (least, most) in zip(parts, spans, strict=True):
        share = spare // max(num_open, 1)
        taken = share if most is None else min(share, most - least)
        made.append(_within(sets, part, least + taken))
        spare -= taken
        num_open -= most != least
    return sets.sequence(made)
