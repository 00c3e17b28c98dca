"""Drafts that a grammar improves: up to the first excluded one, or the text that it forces."""

import pytest

from tests.executor.guided_rounds import LETTERS, compiled
from tllm_spec.grammar_state import GrammarState

xgrammar = pytest.importorskip("xgrammar")


def encode(text: str) -> list[int]:
    return [LETTERS.index(letter) for letter in text]


def state_after(text: str, pattern: str) -> GrammarState:
    state = GrammarState(xgrammar.GrammarMatcher(compiled(pattern)), encode=encode)
    state.read(encode(text), 0)
    return state


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
    state = state_after(text, "abcdef[u-z]+")
    assert state.better_drafts(encode(drafts), 3) == encode(better)
    assert state.better_drafts(encode(drafts), 3) == encode(better)  # it has not advanced


def test_without_a_tokenizer_drafts_are_only_cut() -> None:
    state = GrammarState(xgrammar.GrammarMatcher(compiled("abcdef")))
    assert state.better_drafts(encode("abf"), 3) == encode("ab")
    assert not state.better_drafts(encode("b"), 3)
