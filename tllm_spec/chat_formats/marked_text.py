"""Text of an output in which the markers of a format that are tokens are told apart from the same
text in other tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tllm_spec.chat_formats.pieces import num_held
from tllm_spec.outputs import CompletionOutput
from tllm_spec.text.reasoning import special_ids
from tllm_spec.text.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer

# Is inside what is no marker, until `unsplit`. A noncharacter of Unicode, which no text has.
SPLIT = "\ufdcf"


class Splitter:
    """Splits the names of marker tokens in a text that comes in pieces, and replaces the characters
    that stand for such tokens."""

    def __init__(self, names: Sequence[str], marks: Sequence[str]) -> None:
        self._names, self._held = [each for each in names if each[1:]], ""
        self._marks = str.maketrans(dict.fromkeys([SPLIT, *marks], REPLACEMENT))
        longest = sorted(self._names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest)) or r"\Z.")

    def feed(self, text: str, *, is_end: bool = False) -> str:
        """What is certain after `text`."""
        text = self._held + text.translate(self._marks)
        text = self._pattern.sub(lambda found: f"{found[0][0]}{SPLIT}{found[0][1:]}", text)
        held = num_held(text, self._names) if self._names and not is_end else 0
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def unsplit(text: str) -> str:
    """The text as the model has written it."""
    return text.replace(SPLIT, "")


class MarkedText:
    """The text of an output whose tokens come in pieces. marks: what is read for a marker token, by
    its id, and its name: the same, or a character. Other text is free of marks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        marks: Mapping[int, tuple[str, str]],
        *,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skips = tokenizer, skip_special_tokens
        hidden = special_ids(tokenizer) if skip_special_tokens else set[int]()
        # By id: the mark, and its characters in the output's text.
        self._marks = {
            token: (mark, 0 if token in hidden else len(name))
            for token, (mark, name) in marks.items()
        }
        own = [mark for mark, _ in marks.values()]
        self._splitter = Splitter(own, [mark for mark in own if len(mark) == 1])
        self._detokenizer = self._new_detokenizer()
        self._num_tokens = self._num_chars = 0
        # Texts, their characters in the output, and whether they are marks.
        self._waiting: list[tuple[str, int, bool]] = []

    def new(self, output: CompletionOutput) -> str:
        """What is new since the last call. The end of a token may be of a stop string, and is not
        in the output's text then."""
        run: list[int] = []
        for token in output.token_ids[self._num_tokens :]:
            if (mark := self._marks.get(token)) is None:
                run.append(token)
                continue
            self._wait_with(self._detokenizer.feed(run) + self._detokenizer.flush())
            self._waiting.append((*mark, True))
            self._detokenizer, run = self._new_detokenizer(), []
        self._wait_with(self._detokenizer.feed(run))
        self._num_tokens = len(output.token_ids)
        is_end = output.finish_reason is not None
        if is_end:
            self._wait_with(self._detokenizer.flush())
        is_whole = is_end and not isinstance(output.stop_reason, str)
        found = self._shown(None if is_whole else len(output.text))
        return found + self._splitter.feed("", is_end=True) if is_end else found

    def _new_detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, skip_special_tokens=self._skips)

    def _wait_with(self, text: str) -> None:
        if text:
            self._waiting.append((text, len(text), False))

    def _shown(self, limit: int | None) -> str:
        """limit: characters of the output's text."""
        parts: list[str] = []
        while self._waiting:
            text, length, is_mark = self._waiting[0]
            room = length if limit is None else min(limit - self._num_chars, length)
            if room < length and (is_mark or room <= 0):
                break
            del self._waiting[0]
            self._num_chars += room
            if is_mark:
                parts += [self._splitter.feed("", is_end=True), text]
                continue
            parts.append(self._splitter.feed(text[:room]))
            if room < length:
                self._waiting.insert(0, (text[room:], length - room, False))
        return "".join(parts)
