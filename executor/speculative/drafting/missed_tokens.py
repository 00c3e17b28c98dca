"""Spans of tokens that a draft model has not read yet, cut into forwards.

The tokens come from the host. The callers decide which spans are read, and into which cache."""

from collections.abc import Iterable
from typing import NamedTuple

from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.executor.request import LlmRequest


class Missed(NamedTuple):
    """The request's tokens from `start` up to and without `end`."""

    request: LlmRequest
    start: int
    end: int


def forwards_of(missed: Iterable[Missed], max_num_tokens: int) -> list[list[ContextChunk]]:
    """The chunks of each forward, in order; a forward has at most `max_num_tokens` rows."""
    forwards: list[list[ContextChunk]] = []
    room = 0
    for request, start, end in missed:
        while start < end:
            if not room:
                forwards.append([])
                room = max_num_tokens
            stop = min(end, start + room)
            forwards[-1].append(ContextChunk(request.slot, start, request.tokens[start:stop]))
            room -= stop - start
            start = stop
    return forwards
