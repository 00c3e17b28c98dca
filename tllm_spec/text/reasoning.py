"""Where a model's reasoning begins and ends: the markers of each family, and what a prompt's end
says about the answer after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from tllm_spec.text.tokenizer import Tokenizer, decoder_of

Section = Literal["inside", "over", "undecided"]
"""How an answer begins: inside the reasoning that the prompt has opened, after reasoning that the
prompt has closed, or as its first text that is not blank says: reasoning if it is the opener."""

# Of characters that stand for marker tokens: noncharacters of Unicode, which no text has.
FIRST_MARK = 0xFDD0
MAX_TAIL = 4096  # tokens of a prompt's end that are read


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts around a section. ends_at: markers of calls that end a section, too, and belong to
    the answer."""

    opener: str = "<think>"
    closer: str = "</think>"
    ends_at: tuple[str, ...] = ()


class Marks:
    """Markers in a text, as characters where they are tokens of their own: then only the token is
    the marker, and the same text written with other tokens is text."""

    def __init__(self, tokenizer: Tokenizer, markers: Sequence[str]) -> None:
        """markers: texts that are tokens, or have some in them; at most 32 such tokens."""
        found = marker_tokens(tokenizer, markers)
        longest_first = sorted(found.values(), key=len, reverse=True)
        self.names: Mapping[str, str] = {
            name: chr(FIRST_MARK + place) for place, name in enumerate(longest_first)
        }
        self.of_token: Mapping[int, str] = {i: self.names[name] for i, name in found.items()}

    def marked(self, text: str) -> str:
        """A marker as the parser finds it: parts that are tokens are characters."""
        for name, mark in self.names.items():
            text = text.replace(name, mark)
        return text


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
    prompt: Sequence[int], form: ReasoningFormat, marks: Marks, tokenizer: Tokenizer
) -> Section:
    """What the end of a rendered prompt says. An opener or closer that another special token
    follows, such as the end of a turn, is a part of an earlier message. marks: those of the
    format's markers."""
    tail = _last_turn(prompt[-MAX_TAIL:], marks, tokenizer)
    opener, closer = marks.marked(form.opener), marks.marked(form.closer)
    opened, closed = tail.rfind(opener), tail.rfind(closer)
    if opened > closed:
        return "inside"
    return "undecided" if closed < 0 else "over"


def _last_turn(prompt: Sequence[int], marks: Marks, tokenizer: Tokenizer) -> str:
    """The text after the last special token that is no marker, with marks."""
    special = special_ids(tokenizer) - marks.of_token.keys()
    start = max((place + 1 for place, each in enumerate(prompt) if each in special), default=0)
    decode = decoder_of(tokenizer, skip_special_tokens=False)
    runs = groupby(prompt[start:], marks.of_token.get)
    return "".join(mark or decode([*run]) for mark, run in runs)


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of the tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return {token for token, name in added if name.special} | set(tokenizer.all_special_ids)
