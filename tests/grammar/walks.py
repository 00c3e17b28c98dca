"""Grammars whose tokens are single characters, texts of them, and random texts."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from tllm_spec.grammar.grammar_state import CompiledGrammar, GrammarState
from tllm_spec.grammar.grammar_text import compiled as compiled_for
from tllm_spec.grammar.guided_decoding import GrammarSource, Kind
from tllm_spec.grammar.structural_tags import NamedTokens

CHARACTERS = [*map(chr, range(128)), *"éÀß日本旧😀\u00a0\u0085\u2028٣\ufeff"]
NUMBERS = {each: number for number, each in enumerate(CHARACTERS)}
END = len(CHARACTERS)
MAX_CHARACTERS = 300


class Vocabulary:
    """What llguidance reads of a tokenizer. The token after the words is the end of a text; special
    tokens follow it."""

    bos_token_id = None

    def __init__(self, words: Sequence[bytes], special: Sequence[str] = ()) -> None:
        self.tokens = [*words, b"", *(each.encode() for each in special)]
        self.eos_token_id = len(words)
        self.special_token_ids = [*range(len(words), len(self.tokens))]

    def __call__(self, text: bytes) -> list[int]:
        """Each time the longest word."""
        found, ids = 0, list[int]()
        while found < len(text):
            fitting = [
                each for each in self.tokens[: self.eos_token_id] if text.startswith(each, found)
            ]
            word = max(fitting, key=len)
            ids.append(self.tokens.index(word))
            found += len(word)
        return ids


def grammar_of_words(
    source: GrammarSource,
    words: Sequence[bytes],
    *,
    has_end: bool = True,
    special: Sequence[str] = (),
) -> CompiledGrammar:
    """A grammar for these tokens, an end token unless the model has none, and special tokens."""
    tokenizer = _tokenizer(tuple(words), tuple(special))
    ends = frozenset({len(words)}) if has_end else frozenset[int]()
    ids = {name: len(words) + number for number, name in enumerate(special, start=1)}
    start = compiled_for(source, tokenizer, NamedTokens(ids, frozenset(ids.values()), ends))
    return CompiledGrammar(source, start, ends, -(-tokenizer.vocab_size // 32))


@cache
def _tokenizer(words: tuple[bytes, ...], special: tuple[str, ...]) -> Any:
    llguidance = pytest.importorskip("llguidance")
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary(words, special)))


def compiled(value: Any, kind: Kind = "json_schema") -> CompiledGrammar:
    text = value if kind in ("regex", "grammar") else json.dumps(value)
    return grammar_of_words(GrammarSource(kind, text), [each.encode() for each in CHARACTERS])


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether it is a whole text of the grammar."""
    state = GrammarState(grammar)
    ids = [NUMBERS[each] for each in text]
    return state.better_drafts([*ids, END], 0) == [*ids, END]


def random_text(grammar: CompiledGrammar, rng: random.Random) -> str | None:
    """A text of the grammar, which ends as soon as chance lets it; None if it is too long."""
    state, ids = GrammarState(grammar), list[int]()
    while len(ids) < MAX_CHARACTERS:
        allowed = allowed_tokens(state, END + 1)
        assert allowed, f"nothing can follow {''.join(CHARACTERS[each] for each in ids)!r}"
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.35):
            return "".join(CHARACTERS[each] for each in ids)
        left = [each for each in allowed if each != END]
        closing = [each for each in left if CHARACTERS[each] in '"]}']
        dense = [each for each in left if CHARACTERS[each] not in " \n\t\r"]
        ids.append(rng.choice(closing if closing and rng.random() < 0.35 else dense or left))
        state.read(ids, 0)
    return None


def allowed_tokens(state: GrammarState, num_tokens: int) -> list[int]:
    """What the mask of the next token allows."""
    (row,) = rows_of(state, [0], [-1], num_tokens)
    return row


def rows_of(
    state: GrammarState, tokens: Sequence[int], parents: Sequence[int], num_tokens: int
) -> list[list[int]]:
    """The tokens that each row of a window allows."""
    bitmask = torch.full((len(tokens), -(-num_tokens // 32)), -1, dtype=torch.int32)
    state.fill(tokens, parents, bitmask)
    rows = bitmask.tolist()
    return [[i for i in range(num_tokens) if row[i // 32] >> (i % 32) & 1] for row in rows]
