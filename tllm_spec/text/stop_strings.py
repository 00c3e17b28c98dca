"""Stop strings in a growing text: found across token borders, and never shown in part.

`StopStringChecker` works in the executor, token by token. `StreamedText` works where the output is
read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from tllm_spec.executor.request import LlmRequest, StopMatch, StopOptions
from tllm_spec.grammar.thinking_budget import Sections
from tllm_spec.text.tokenizer import REPLACEMENT, IncrementalDetokenizer, Tokenizer


class FoundStop(NamedTuple):
    """A stop string and its position in the text. The one that ends first sorts first."""

    end: int
    begin: int
    stop: str


class _Search:
    """Knuth-Morris-Pratt search for one stop string in a growing text: each character is read once.
    `matched` is the length of the stop string's beginning that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # KMP's failure function: entry n is the next shorter match when n + 1 characters match and
        # the next one does not.
        self._shorter = [0] * len(stop)
        for index in range(1, len(stop)):
            self._shorter[index] = self._step(self._shorter[index - 1], stop[index])

    def feed(self, piece: str) -> int:
        """The number of characters of `piece` up to the first end of the stop string; 0 if there is
        none."""
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
    """Looks for stop strings in a text that arrives in pieces. The text itself is not stored."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._searches = [_Search(stop) for stop in stops]
        self._num_chars = 0

    def feed(self, piece: str) -> FoundStop | None:
        """The stop string that ends first within `piece`; of several that end together, the
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
        """Length of the longest end of the text that is the beginning of a stop string."""
        return max((search.matched for search in self._searches), default=0)


class TokenTexts:
    """A text that grows by single tokens, and where each token begins in it."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        self._detokenizer = detokenizer
        self._num_chars = 0
        self.begins: list[int] = []  # in characters, never falling

    def feed(self, token: int) -> str:
        """The text that `token` adds or completes."""
        piece = self._detokenizer.feed([token])
        # Invalid bytes come out with the next character, and belong to the tokens before it.
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
        self,
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str],
        *,
        include_stop: bool,
        sections: Sections | None = None,
    ) -> None:
        self._sections = sections
        self._place = None if sections is None else sections.start
        self._tokens = TokenTexts(detokenizer)
        self._matcher = StopStringMatcher(stops)
        self._include_stop = include_stop
        self._pieces: list[str] = []

    def feed(self, token: int) -> StopMatch | None:
        """What the request's output becomes when `token` completes a stop string, else None."""
        piece = self._tokens.feed(token)
        self._pieces.append(piece)
        found = self._matcher.feed(piece)
        if self._is_forced(token) or found is None:
            return None
        end = found.end if self._include_stop else found.begin
        return StopMatch(found.stop, "".join(self._pieces)[:end], self._tokens.num_before(end))

    def _is_forced(self, token: int) -> bool:
        if self._sections is None or self._place is None:
            return False
        forced = self._sections.forced(self._place)
        self._place = self._sections.after(self._place, token)
        return forced == token


def look_for_stops(
    requests: Sequence[LlmRequest],
    tokenizer: Tokenizer,
    options: StopOptions,
    sections: Sections | None = None,
) -> None:
    """Gives each request these stop strings, and a checker of its own. sections: with a budget,
    whose forced tokens complete no stop string."""
    skips, keeps = options.skip_special_tokens, options.include_stop
    for request in requests:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips)
        request.stop_options = options
        request.stop_checker = StopStringChecker(
            detokenizer, options.stops, include_stop=keeps, sections=sections
        )


class StreamedText:
    """The part of a growing output that may be shown: no unfinished characters, no beginnings of
    stop strings, and no tokens of either."""

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
        # Where each token begins in the text, in characters. Empty without `wants_begins`.
        self.token_begins = self._tokens.begins if wants_begins else []
        self._matcher = StopStringMatcher(stops)
        self._held = ""
        self._num_chars_shown = 0
        self._num_tokens = 0

    @property
    def num_shown(self) -> int:
        """How many tokens may be shown: those that begin in the shown text. Without stop strings
        these are all."""
        if not self._has_stops:
            return self._num_tokens
        return self._tokens.num_before(self._num_chars_shown)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that may be shown after `token_ids`, without what was shown before."""
        self._num_tokens += len(token_ids)
        piece = self._piece(token_ids, by_token=self._has_stops or self._wants_begins)
        if not self._has_stops:
            self._num_chars_shown += len(piece)
            return piece
        self._matcher.feed(piece)
        ready = self._held + piece
        split = len(ready) - self._matcher.num_held()
        self._held = ready[split:]
        self._num_chars_shown += split
        return ready[:split]

    def finish(self, token_ids: Sequence[int], final_text: str | None = None) -> str:
        """The rest of the text after the last tokens. final_text: the whole text, if a stop string
        has cut it."""
        piece = self._piece(token_ids, by_token=self._wants_begins)
        if final_text is not None:
            return final_text[self._num_chars_shown :]
        return self._held + piece + self._detokenizer.flush()

    def _piece(self, token_ids: Sequence[int], *, by_token: bool) -> str:
        if by_token:
            return "".join(map(self._tokens.feed, token_ids))
        return self._detokenizer.feed(token_ids)
