"""Where a model's reasoning begins and ends: the markers of each family, and what a prompt's end
says about the answer after it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from tllm_spec.text.tokenizer import REPLACEMENT, Tokenizer, decoder_of

Section = Literal["inside", "over", "undecided"]
"""How an answer begins: inside the reasoning that the prompt has opened, after reasoning that the
prompt has closed, or as its first text that is not blank says: reasoning if it is the opener."""

MAX_TAIL = 4096  # tokens of a prompt's end that are read


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around a section. ends_at: markers of calls that end a section, too, and belong to
    the answer."""

    opener: str = "<think>"
    closer: str = "</think>"
    ends_at: tuple[str, ...] = ()


def marker_tokens(tokenizer: Any, markers: Sequence[str]) -> dict[int, str]:
    """The names of the tokens that are markers, by id, and of special tokens that are parts of
    one."""
    special = special_ids(tokenizer)
    return {
        token: str(name)
        for token, name in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if str(name) in markers or (token in special and any(str(name) in each for each in markers))
    }


def section_after(
    prompt: Sequence[int], form: ReasoningFormat, tokens: Mapping[int, str], tokenizer: Tokenizer
) -> Section:
    """What the end of a rendered prompt says. An opener or closer that another special token
    follows, such as the end of a turn, is a part of an earlier message. tokens: those of the
    format's markers."""
    tail = _last_turn(prompt[-MAX_TAIL:], tokens, tokenizer)
    opened, closed = tail.rfind(form.opener), tail.rfind(form.closer)
    if opened > closed:
        return "inside"
    return "undecided" if closed < 0 else "over"


def _last_turn(prompt: Sequence[int], tokens: Mapping[int, str], tokenizer: Tokenizer) -> str:
    """The text after the last special token that is no marker. What other tokens write is no
    marker where there is a token of that name."""
    special = special_ids(tokenizer) - tokens.keys()
    start = max((place + 1 for place, each in enumerate(prompt) if each in special), default=0)
    decode = decoder_of(tokenizer, skip_special_tokens=False)
    names = re.compile("|".join(map(re.escape, tokens.values())) or r"\Z.")
    runs = groupby(prompt[start:], tokens.get)
    return "".join(name or names.sub(REPLACEMENT, decode([*run])) for name, run in runs)


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of the tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {token for token, name in added if name.special} | set(tokenizer.all_special_ids)
