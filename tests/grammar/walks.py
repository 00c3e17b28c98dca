"""A compiler whose tokens are single characters, and random texts of its grammars."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

from tllm_spec.grammar.xgrammar_source import compile_text

CHARACTERS = [*map(chr, range(128)), *"éÀß日本😀\u00a0\u0085\u2028٣\ufeff"]
NUMBERS = {each: number for number, each in enumerate(CHARACTERS)}
END = len(CHARACTERS)
MAX_CHARACTERS = 300


@cache
def _compiler() -> Any:
    xgrammar = pytest.importorskip("xgrammar")
    tokens = xgrammar.TokenizerInfo([*CHARACTERS, "<end>"], stop_token_ids=[END])
    return xgrammar.GrammarCompiler(tokens, max_threads=1, cache_enabled=False)


def compiled(schema: Any, kind: str = "json_schema") -> Any:
    text = schema if kind in ("regex", "grammar") else json.dumps(schema)
    return compile_text(_compiler(), kind, text)


def accepts(grammar: Any, text: str) -> bool:
    """Whether it is a whole text of the grammar."""
    import xgrammar

    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(NUMBERS[each]) for each in text) and matcher.accept_token(END)


def random_text(grammar: Any, rng: random.Random) -> str | None:
    """A text of the grammar, which ends as soon as chance lets it; None if it is too long."""
    import xgrammar

    matcher, text = xgrammar.GrammarMatcher(grammar), ""
    while len(text) < MAX_CHARACTERS:
        allowed = _allowed(matcher)
        assert allowed, f"nothing can follow {text!r}"
        if END in allowed and (len(allowed) == 1 or rng.random() < 0.35):
            return text
        left = [each for each in allowed if each != END]
        closing = [each for each in left if CHARACTERS[each] in '"]}']
        dense = [each for each in left if CHARACTERS[each] not in " \n\t\r"]
        token = rng.choice(closing if closing and rng.random() < 0.35 else dense or left)
        assert matcher.accept_token(token)
        text += CHARACTERS[token]
    return None


def _allowed(matcher: Any) -> list[int]:
    import xgrammar

    bitmask = xgrammar.allocate_token_bitmask(1, END + 1)
    matcher.fill_next_token_bitmask(bitmask)
    words = bitmask[0].tolist()
    return [each for each in range(END + 1) if words[each // 32] >> (each % 32) & 1]
