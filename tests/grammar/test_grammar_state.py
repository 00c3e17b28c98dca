"""Drafts that a grammar improves: up to the first excluded one, or the text that it forces.
Masks of a window's rows."""

import pytest
import torch

from tests.executor.guided_rounds import LETTERS, compiled
from tllm_spec.grammar.grammar_state import DraftNodes, GrammarState

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


# Bytes as tokens, two words and an end token.
TOKENS = [bytes([value]) for value in range(256)] + [b"no", b"yes", b"<end>"]
NO, END = 256, 258


def state_of(grammar: str) -> GrammarState:
    tokens = xgrammar.TokenizerInfo(TOKENS, xgrammar.VocabType.RAW, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)
    matcher = xgrammar.GrammarMatcher(compiler.compile_grammar(grammar))
    return GrammarState(matcher, encode=lambda text: list(text.encode()))


@pytest.mark.parametrize(
    ("choices", "emitted", "forced"),
    [
        (("day é", "day è"), "", "day "),  # the first byte of both characters is forced, too
        (("a日", "a旧"), "a", ""),
        (("say 😀",), "sa", "y 😀"),
        (("say 😀",), b"say " + "😀".encode()[:2], ""),  # the rest of the character
    ],
)
def test_text_that_is_forced_up_to_a_part_of_a_character_is_drafted_before_it(
    choices: tuple[str, ...], emitted: str | bytes, forced: str
) -> None:
    state = state_of("root ::= " + " | ".join(f'"{choice}"' for choice in choices))
    state.read(list(emitted.encode() if isinstance(emitted, str) else emitted), 0)
    assert state.better_drafts([], 9) == list(forced.encode())


def num_allowed(state: GrammarState, nodes: DraftNodes) -> list[int]:
    """The number of tokens of each row."""
    bitmask = torch.full((len(nodes.tokens), -(-len(TOKENS) // 32)), -1, dtype=torch.int32)
    state.fill(nodes, bitmask)
    bits = bitmask.view(torch.uint8).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return [int(row.sum()) for row in bits.flatten(1)[:, : len(TOKENS)]]


def test_rows_after_a_draft_that_ends_the_grammar_are_free() -> None:
    state, free = state_of('root ::= "no" | "yes"'), len(TOKENS)
    chain = DraftNodes.chain(torch.tensor([0, NO, END, 5, END]))
    assert num_allowed(state, chain) == [4, 1, free, free, free]
    tree = DraftNodes.tree(torch.tensor([0, NO, 5, END, 7, END]), [-1, 0, 0, 1, 1, 3])
    allowed = num_allowed(state, tree)
    assert [allowed[node] for node in (0, 1, 3, 5)] == [4, 1, free, free]
    excluded = DraftNodes.chain(torch.tensor([0, END, NO]))  # no end at the text's beginning
    assert num_allowed(state, excluded)[0] == 4


def test_drafts_after_the_grammars_end_are_kept() -> None:
    state = state_of('root ::= "no" | "yes"')
    assert state.better_drafts([NO, END, 5, 6], 4) == [NO, END, 5, 6]
    assert state.better_drafts([NO, 5, END], 4) == [NO]
