"""Calls between markers in a text."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence

from tllm_spec.chat_formats.chat_format import Function
from tllm_spec.chat_formats.pieces import (
    MAX_HEAD,
    CallStart,
    JsonEnd,
    Piece,
    StepParser,
    Steps,
    Text,
    num_held,
)


class MarkedCalls(StepParser):
    """White space next to a call is left out, as are the `ignored` markers around all calls."""

    start: str
    end: str
    ignored: tuple[str, ...] = ()

    def __init__(self, functions: Sequence[Function] = ()) -> None:
        super().__init__()
        self.functions = functions
        self._after_call = False

    @abstractmethod
    def call(self) -> Steps[None]:
        """Reads what follows `start`."""

    def steps(self) -> Steps[None]:
        markers = (self.start, *self.ignored)
        any_marker = re.compile("|".join(map(re.escape, markers)))
        while True:
            if found := any_marker.search(self.text):
                yield self.shown(self.taken(found.start()).rstrip())
                self.taken(len(found[0]))
                self._after_call = True
                if found[0] == self.start:
                    yield from self.call()
            elif self.has_ended:
                yield self.shown(self.taken())
                return
            else:
                free = self.text[: len(self.text) - num_held(self.text, markers)]
                yield self.shown(self.taken(len(free.rstrip())))
                yield None

    def shown(self, text: str) -> Piece:
        """A piece of the answer."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return Text(text)

    def head(self, pattern: re.Pattern[str]) -> Steps[re.Match[str] | None]:
        """Reads the beginning of a call. Without one before the next marker there is no call, but
        text."""
        markers = re.compile("|".join(map(re.escape, (self.start, self.end))))
        while not (found := pattern.match(self.text, 0, MAX_HEAD)):
            if markers.search(self.text) or self.has_ended:
                break
            yield None
        if not found or markers.search(found[0]):
            yield self.shown(self.start)
            return None
        self.taken(found.end())
        return found

    def json_arguments(self, name: str) -> Steps[None]:
        """Reads the rest of a call."""
        yield CallStart(name)
        yield from self.json(JsonEnd())
        yield from self.past(self.end)

    def past(self, marker: str) -> Steps[None]:
        """Leaves out what there is up to a marker, and that."""
        while marker not in self.text and not self.has_ended:
            yield None
        self.text = self.text.partition(marker)[2]
