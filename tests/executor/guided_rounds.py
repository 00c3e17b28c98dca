"""Requests with grammars for the tiny target, and what happens in their rounds."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import HOT
from tests.executor.harness import Harness, output_of
from tests.grammar.walks import grammar_of_words
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.request import LlmRequest
from tllm_spec.grammar.grammar_state import CompiledGrammar, GrammarState
from tllm_spec.grammar.guided_decoding import GrammarSource

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
PATTERNS = ("([a-m]+[0-9]|[A-Z][n-z]{1,3}|-_)*", "([aeiou][^aeiou]{1,5})*")


@cache
def compiled(pattern: str) -> CompiledGrammar:
    """Without an end token. Its text is drafted by the tests only."""
    source, letters = GrammarSource("regex", pattern), [each.encode() for each in LETTERS]
    return replace(grammar_of_words(source, letters, has_end=False), drafts_forced=False)


def grammar_of(pattern: str) -> GrammarState:
    return GrammarState(compiled(pattern))


def text_of(request: LlmRequest) -> str:
    return "".join(LETTERS[token] for token in output_of(request))


def submit_guided(harness: Harness, number: int = 8, **params: Any) -> list[LlmRequest]:
    """Requests of many lengths, which end one by one, by length or by a stop token. The first one
    and every second one after it have grammars. params: of those."""
    random = Random(3)
    return [
        harness.submit(
            [random.randrange(64) for _ in range(random.randrange(1, 12))],
            max_tokens=5 + 3 * i + 15 * (i == 0),
            temperature=HOT if i % 3 else None,
            stop_token_ids=[random.randrange(64) for _ in range(i % 3)],
            draft_limit=(3, 3, 1)[i % 3] if harness.max_draft_len else None,
            seed=i,
            grammar=None if i % 2 else grammar_of(PATTERNS[i // 2 % 2]),
            **({} if i % 2 else params),
        )
        for i in range(number)
    ]


def assert_grammatical(requests: list[LlmRequest]) -> None:
    """Every text is the beginning of one that matches its pattern."""
    for request in requests[::2]:
        assert request.num_output_tokens > 1 and request.grammar is not None
    for i, request in enumerate(requests[::2]):
        check = grammar_of(PATTERNS[i % 2])
        check.read(output_of(request), 0)  # asserts
    whole = [text_of(request) for request in requests[::2]]
    assert any(not re.fullmatch("[a-z]*", text) for text in whole)


def events_of(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens in rounds from now on, with the round's number: its forward is launched, its
    results are read, masks for it are filled, its sampling is launched."""
    runner, events, rounds = harness.parts.runner, list[str](), list[ToHost]()
    launch, wait, fill = runner.launch, ToHost.wait, GrammarState.fill
    forward, sample = runner.engine.forward, harness.parts.sampler._emit

    def watched_launch(batch: Any) -> Any:
        launched = launch(batch)
        rounds.append(launched.to_host)
        return launched

    def watched_wait(to_host: ToHost) -> list[torch.Tensor]:
        if to_host in rounds:
            events.append(f"read {rounds.index(to_host)}")
        return wait(to_host)

    def watched_fill(state: GrammarState, *arguments: Any) -> Mapping[int, int]:
        events.append(f"fill {len(rounds)}")
        return fill(state, *arguments)

    def watched_forward(*arguments: Any) -> torch.Tensor:
        events.append(f"forward {len(rounds)}")
        return forward(*arguments)

    def watched_sample(*arguments: Any) -> Any:
        events.append(f"sample {len(rounds)}")
        return sample(*arguments)

    monkeypatch.setattr(runner, "launch", watched_launch)
    monkeypatch.setattr(ToHost, "wait", watched_wait)
    monkeypatch.setattr(GrammarState, "fill", watched_fill)
    monkeypatch.setattr(runner.engine, "forward", watched_forward)
    monkeypatch.setattr(harness.parts.sampler, "_emit", watched_sample)
    return events
