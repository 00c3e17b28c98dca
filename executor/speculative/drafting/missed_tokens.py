"""Tokens that a draft network has not read and that the device no longer keeps for it.

`LlmRequest.draft_backlog` counts what a request's draft network has not read. The last of these
tokens are on the device: in a ring (draft_backlog.py), or in the slot, for a draft model with pages
of its own. Earlier ones are read from the host's tokens before drafting resumes, in forwards of at
most `max_num_tokens` rows, as prompts are."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers


class Missed(NamedTuple):
    """The request's tokens from `start` up to and without `end`."""

    request: LlmRequest
    start: int
    end: int


def missed_by(request: LlmRequest, num_kept: int, num_read: int = 0) -> Missed:
    """What a generating request's draft network has not read, but for the last `num_kept` tokens.
    The backlog is a bound: the first `num_read` tokens were read in any case.

    The latest rounds have added one token each, so the host knows the end on the device, also with
    a round in flight."""
    end = request.num_tokens + (request.tokens_in_flight > 0)
    return Missed(request, max(num_read, end - request.draft_backlog), end - num_kept)


def read_missed(layers: DraftLayers, missed: Iterable[Missed], max_num_tokens: int) -> None:
    """The draft network reads these tokens."""
    for chunks in _forwards(missed, max_num_tokens):
        no_rows = torch.empty(0, dtype=torch.int64, device=layers.rows.device)
        layers.forward(chunks, None, None, wanted=no_rows)


def _forwards(missed: Iterable[Missed], max_num_tokens: int) -> list[list[ContextChunk]]:
    """The chunks of each forward, in order."""
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
