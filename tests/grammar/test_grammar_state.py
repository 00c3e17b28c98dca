"""Drafts that a grammar improves: up to the first excluded one, or the tokens that it forces.
Masks of a window's rows."""

import json

import pytest

from tests.grammar.walks import grammar_of_words, rows_of
from tllm_spec.grammar import grammar_text
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.grammar.guided_decoding import GrammarSource, Kind
from tllm_spec.request_errors import NO_GUIDED_TOKEN, SLOW_GRAMMAR

LETTERS = "abcdefghijklmnopqrstuvwxyz0"
# Bytes as tokens, two words, and an end token.
WORDS = [bytes([value]) for value in range(256)] + [b"no", b"yes"]
NO, YES, END = 256, 257, 258
SIZE = 259


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def state_of(text: str, kind: Kind = "grammar", words: list[bytes] = WORDS) -> GrammarState:
    return GrammarState(grammar_of_words(GrammarSource(kind, text), words))


@pytest.mark.parametrize(
    ("text", "drafts", "better"),
    [
        ("a", "cde", "bcd"),  # forced, at most three
        ("a", "bcd", "bcd"),
        ("abcdef", "0", ""),  # neither is allowed nor forced
        ("abcdef", "xy0", "xy"),
        ("abcde", "fxy", "fxy"),  # longer than what is forced
        ("abcde", "", "f"),
    ],
)
def test_drafts_are_cut_at_the_first_excluded_one_or_replaced_by_forced_text(
    text: str, drafts: str, better: str
) -> None:
    state = state_of("abcdef[u-z]+", "regex", [letter.encode() for letter in LETTERS])
    state.read(encode(text), 0)
    assert state.better_drafts(encode(drafts), 3) == encode(better)
    assert state.better_drafts(encode(drafts), 3) == encode(better)  # it has not advanced


@pytest.mark.parametrize(
    ("choices", "emitted", "forced"),
    [
        (("day é", "day è"), "", b"day "),
        (("a日", "a旧"), "a", b""),
        (("say 😀",), "sa", "y 😀".encode()),
    ],
)
def test_text_that_is_forced_is_drafted(
    choices: tuple[str, ...], emitted: str, forced: bytes
) -> None:
    state = state_of("root ::= " + " | ".join(f'"{choice}"' for choice in choices))
    state.read(list(emitted.encode()), 0)
    assert bytes(state.better_drafts([], 9)).startswith(forced)


def test_rows_after_a_draft_that_ends_the_grammar_are_free() -> None:
    state, free = state_of('root ::= "no" | "yes"'), list(range(SIZE))
    first = [ord("n"), ord("y"), NO, YES]
    chain = rows_of(state, [0, NO, END, 5, END], range(-1, 4), SIZE)
    assert chain == [first, [END], free, free, free]
    tree = rows_of(state, [0, NO, 5, END, 7, END], [-1, 0, 0, 1, 1, 3], SIZE)
    assert [tree[node] for node in (0, 1, 3, 5)] == [first, [END], free, free]
    assert rows_of(state, [0, END, NO], range(-1, 2), SIZE)[0] == first
    assert rows_of(state, [0, NO, END, 5, END], range(-1, 4), SIZE) == chain


def test_a_row_of_a_tree_is_a_function_of_the_text_before_it() -> None:
    schema = '{"properties": {"no": {"type": "integer"}, "yes": {"enum": ["no", "n"]}}}'
    state = state_of(schema, "json_schema")
    texts = [b"", b'{"', b"{ ", b'{"no', b'{"yes', b'{"no"', b'{"yes": "n', b'{"yes": "no', b"{x"]
    tokens, parents, nodes = [0], [-1], {b"": 0}
    for text in texts:
        for end in range(1, len(text) + 1):
            if text[:end] not in nodes:
                nodes[text[:end]] = len(tokens)
                tokens.append(text[end - 1])
                parents.append(nodes[text[: end - 1]])
    rows = rows_of(state, tokens, parents, SIZE)
    for text in texts[:-1]:
        alone = state_of(schema, "json_schema")
        alone.read(list(text), 0)
        assert rows[nodes[text]] == rows_of(alone, [0], [-1], SIZE)[0], text


def test_drafts_after_the_grammars_end_are_kept() -> None:
    state = state_of('root ::= "no" | "yes"')
    assert state.better_drafts([NO, END, 5, 6], 4) == [NO, END, 5, 6]
    assert state.better_drafts([NO, 5, END], 4) == [NO]


def test_a_limit_in_one_draft_costs_the_other_rows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's own row has no tokens, and the request fails only if its text comes there."""
    monkeypatch.setitem(grammar_text.LIMITS, "max_items_in_row", 40)
    grammar = 'root ::= "y" s | "no" [a-z]*\ns ::= [a-z] | s s | s s s'
    state = state_of(grammar)
    deep = [0, *b"yaaaaaaaaaaa"]
    tokens, parents = [*deep, NO, ord("x")], [*range(-1, len(deep) - 1), 0, len(deep)]
    rows = rows_of(state, tokens, parents, SIZE)
    assert rows[0] == [ord("n"), ord("y"), NO, YES] and [] in rows[: len(deep)]
    assert rows[len(deep)] == rows[len(deep) + 1] != [] and state.failure is None
    first = rows.index([])
    state.read(tokens[1 : first + 1], 0)
    assert rows_of(state, [0], [-1], SIZE) == [[]] and state.failure == SLOW_GRAMMAR
    assert state.why_no_token(tokens[1 : first + 1], 0) == SLOW_GRAMMAR


def test_a_text_that_can_be_neither_ended_nor_continued_says_so() -> None:
    state = GrammarState(grammar_of_words(GrammarSource("regex", "ab"), WORDS, has_end=False))
    assert state.why_no_token(list(b"a"), 0) == NO_GUIDED_TOKEN
    assert state.why_no_token(list(b"ab"), 0) is None
    assert rows_of(state, [0], [-1], SIZE - 1) == [[]]


@pytest.mark.parametrize(
    ("kind", "text", "is_drafted"),
    [
        ("regex", "a{70000}", False),
        ("regex", "[ab](a{300}){200}", False),
        ("regex", "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}", True),
        ("choice", json.dumps(["a" * 20000]), False),
        ("choice", json.dumps(["yes"] * 9000), True),
        ("json_schema", json.dumps({"pattern": "^(a{1000}){1000}$"}), False),
        ("json_schema", json.dumps({"maxLength": 70000, "minItems": 9**9, "title": "a" * 9}), True),
    ],
)
def test_text_that_may_be_forced_for_long_is_not_drafted(
    kind: Kind, text: str, is_drafted: bool
) -> None:
    """llguidance would go through all of it for each mask."""
    source = GrammarSource(kind, text)
    assert grammar_text.forces_much(source) is not is_drafted
    assert ("no_forcing" in grammar_text.grammar_text(source)) is not is_drafted
    assert GrammarState(grammar_of_words(source, WORDS)).failure is None
