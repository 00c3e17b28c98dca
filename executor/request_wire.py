"""Requests, and what they are checked against before they are queued, as plain data for another
process: of one prompt's samples. No message can make the other side run code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tllm_spec.executor.request import DecodingRules, LlmRequest, samples_of
from tllm_spec.grammar.thinking_budget import TextRules
from tllm_spec.sampling_params import RequestOptions


@dataclass(frozen=True)
class RequestLimits:
    """What a request is checked against. end_ids: of the model; the tokenizer's is one more.
    max_seq_len: the longest sequence that the engine can run, in tokens of prompt and output: the
    context, or what the KV cache has room for. pause_patience: as `RequestPause`."""

    vocab_size: int
    end_ids: tuple[int, ...]
    max_seq_len: int
    max_draft_len: int
    pause_patience: int | None


SETS = frozenset({"end_ids", "stop_token_ids"})
# User's functions cannot be sent, and come from Python only.
RULES = tuple(each.name for each in fields(DecodingRules) if each.name != "edits")
OPTIONS = ("max_tokens", "draft_limit", *(each.name for each in fields(RequestOptions)))


def pack_requests(requests: Sequence[LlmRequest]) -> list[Any]:
    """`[ids, seeds, tokens, rules, options]`, without stop strings and grammar."""
    first = requests[0]
    return [
        [request.request_id for request in requests],
        [request.seed for request in requests],
        first.tokens,
        {name: _plain(getattr(first.rules, name)) for name in RULES},
        [getattr(first, name) for name in OPTIONS],
    ]


def unpack_requests(
    packed: Sequence[Any],
    ids: Sequence[int],
    limits: RequestLimits,
    grammars: Sequence[TextRules | None],
) -> list[LlmRequest]:
    """What `pack_requests` returned. ids: the requests' ids in this process."""
    _, seeds, tokens, plain, options = packed
    sets = {name: frozenset(plain[name]) for name in SETS}
    sequences = tuple(map(tuple, plain["bad_sequences"]))
    given = dict(zip(OPTIONS, options, strict=True))
    rules = DecodingRules(**plain | sets | {"bad_sequences": sequences, "edits": ()})
    given["client"] = tuple(given["client"])
    given |= {"max_draft_len": limits.max_draft_len, "pause_patience": limits.pause_patience}
    return samples_of(tokens, rules, ids, seeds, grammars, **given)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, frozenset) else value
