"""What a draft model has missed of its requests, read from the tokens that the host has.

It cuts such spans into forwards; which spans those are, and whose cache they go to, is its callers'
to say."""

from collections.abc import Iterable
from typing import NamedTuple

from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.executor.request import LlmRequest


class Missed(NamedTuple):
    """Tokens `start` to `end` of the request, the latter excluded."""

    request: LlmRequest
    start: int
    end: int


def forwards_of(missed: Iterable[Missed], max_num_tokens: int) -> list[list[ContextChunk]]:
    """The chunks of forwards that have at most `max_num_tokens` rows each, in order."""
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
