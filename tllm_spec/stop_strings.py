"""Stop strings in a growing text: found across token borders, and never shown to a reader by
halves.

`StopStringChecker` works in the executor, token by token; `StreamedText` serves whoever reads the
output."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from tllm_spec.executor.request import StopMatch
from tllm_spec.tokenizer import REPLACEMENT, IncrementalDetokenizer


class FoundStop(NamedTuple):
    """A stop string and where it lies in the text; the first one to end comes first."""

    end: int
    begin: int
    stop: str


class _Search:
    """Of one stop string in a growing text, as Knuth, Morris and Pratt do it: each character is
    looked at once, however long the stop string is. `matched`: of its characters, how many stand at
    the end of the text."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = [0] * len(
            stop
        )  # what is still matched where the character behind the n + 1st is another
        for place in range(1, len(stop)):
            self._shorter[place] = self._step(self._shorter[place - 1], stop[place])

    def feed(self, piece: str) -> int:
        """How many characters of `piece` there are up to the first end of the stop string; 0
        without any."""
        first_end = 0
        for number, character in enumerate(piece, start=1):
            self.matched = self._step(self.matched, character)
            if self.matched == len(self.stop):
                first_end = first_end or number
                self.matched = self._shorter[-1]
        return first_end

    def _step(self, matched: int, character: str) -> int:
        while matched and self.stop[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + (self.stop[matched] == character)


class StopStringMatcher:
    """Looks for stop strings in a text that arrives in pieces; of the text it remembers nothing."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._num_chars = 0

    def feed(self, piece: str) -> FoundStop | None:
        """The first stop string to end within `piece`; of several that end together, the
        longest."""
        before = self._num_chars
        self._num_chars += len(piece)
        found = [
            FoundStop(before + end, before + end - len(search.stop), search.stop)
            for search in self._searches
            if (end := search.feed(piece))
        ]
        return min(found, default=None)

    def num_held(self) -> int:
        """Length of the longest end of the text with which a stop string could begin."""
        return max((search.matched for search in self._searches), default=0)


class TokenTexts:
    """A text that grows by single tokens, and where in it each of them begins."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_chars = 0
        self.begins: list[int] = []  # in characters, never falling

    def feed(self, token: int) -> str:
        """The text that `token` adds or completes."""
        piece = self._detokenizer.feed([token])
        # Bytes that are no character come out with the next one, and belong to the tokens before
        # it.
        num_invalid = len(piece) - len(piece.lstrip(REPLACEMENT))
        self.begins.append(self._num_chars + num_invalid)
        self._num_chars += len(piece)
        return piece

    def num_before(self, end: int) -> int:
        """How many tokens begin before character `end`."""
        return bisect_left(self.begins, end)


class StopStringChecker:
    """Checks one request's output for its stop strings after each token (the executor's
    `StopChecker`).

    `include_stop` keeps the stop string itself in the text and its tokens in the output.
    """

    def __init__(
        self, detokenizer: IncrementalDetokenizer, stops: Sequence[str], *, include_stop: bool
    ) -> None:
        self._tokens = TokenTexts(detokenizer)
        self._matcher = StopStringMatcher(stops)
        self._include_stop = include_stop
        self._pieces: list[str] = []

    def feed(self, token: int) -> StopMatch | None:
        """What the request's output becomes when `token` completes a stop string, else None."""
        piece = self._tokens.feed(token)
        self._pieces.append(piece)
        found = self._matcher.feed(piece)
        if found is None:
            return None
        end = found.end if self._include_stop else found.begin
        return StopMatch(found.stop, "".join(self._pieces)[:end], self._tokens.num_before(end))


class StreamedText:
    """What a reader of a growing output may see: no half characters, no half stop strings, and no
    token of either.

    `token_begins` says where in the text each token begins, if that is wanted.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str] = (),
        *,
        wants_begins: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._tokens = TokenTexts(detokenizer)
        self._has_stops = bool(stops)
        self._wants_begins = wants_begins
        self._matcher = StopStringMatcher(stops)
        self._held = ""
        self._num_chars_shown = 0
        self._num_tokens = 0

    @property
    def token_begins(self) -> list[int]:
        """In characters; empty unless wanted."""
        return self._tokens.begins if self._wants_begins else []

    @property
    def num_shown(self) -> int:
        """How many tokens may be shown: those that begin in the shown text. Without stop strings
        nothing can take one back."""
        return (
            self._tokens.num_before(self._num_chars_shown) if self._has_stops else self._num_tokens
        )

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown after `token_ids`, without what has been shown."""
        self._num_tokens += len(token_ids)
        piece = self._piece(token_ids, by_token=self._has_stops or self._wants_begins)
        self._matcher.feed(piece)
        ready = self._held + piece
        split = len(ready) - self._matcher.num_held()
        self._held = ready[split:]
        self._num_chars_shown += split
        return ready[:split]

    def finish(self, token_ids: Sequence[int], final_text: str | None = None) -> str:
        """The rest, with the last tokens: up to the end of `final_text` where a stop string has cut
        the text, else all of it."""
        piece = self._piece(token_ids, by_token=self._wants_begins)
        if final_text is not None:
            return final_text[self._num_chars_shown :]
        return self._held + piece + self._detokenizer.flush()

    def _piece(self, token_ids: Sequence[int], *, by_token: bool) -> str:
        if by_token:
            return "".join(map(self._tokens.feed, token_ids))
        return self._detokenizer.feed(token_ids)
