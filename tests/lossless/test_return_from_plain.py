"""Rounds without drafts leave the draft side where it would have been: acceptance is back at once after them."""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.executor.harness import Harness
from tests.lossless.cases import heldout_prompts
from tests.lossless.engines import engine
from tllm_spec.executor.request import LlmRequest
from tllm_spec.tokenizer import Tokenizer

DRAFT_LEN, PLAIN_ROUNDS, ROUNDS_AFTER, NUM_REQUESTS = 3, 32, 5, 8
MODES = ("eagle3", "draft_target_one_model", "eagle3_two_model", "draft_target")
NO_REUSE = {"kv_cache_config": {"enable_block_reuse": False}, "max_seq_len": 512}


@dataclass(frozen=True)
class Seen:
    num_tokens: int  # before the round
    num_drafted: int
    num_accepted: int


def watch(harness: Harness) -> dict[int, list[Seen]]:
    """Every generation round of every request, as it is read."""
    seen: dict[int, list[Seen]] = {}
    update = harness.executor._update_requests

    def watched(launched: Any) -> list[LlmRequest]:
        requests = [request for request in launched.batch.generation_requests if not request.is_finished]
        drafts = dict(zip(launched.batch.generation_requests, launched.num_drafts, strict=True))
        before = {request: request.num_tokens for request in requests}
        with_news = update(launched)
        for request in requests:
            news = Seen(before[request], drafts[request], request.py_num_accepted_draft_tokens)
            seen.setdefault(request.request_id, []).append(news)
        return with_news

    harness.executor._update_requests = watched  # type: ignore[method-assign] # the test looks on
    return seen


def submit(harness: Harness, prompts: list[list[int]], **lengths: Any) -> list[LlmRequest]:
    """Every second one is sampled; a request's noise depends on its seed and on places in the text only."""
    return [
        harness.submit(prompt, 120, temperature=0.8 if number % 2 else None, seed=number, **lengths)
        for number, prompt in enumerate(prompts)
    ]


def drafted_rounds(seen: list[Seen], behind: int) -> list[Seen]:
    return [each for each in seen if each.num_drafted and each.num_tokens > behind]


@pytest.mark.parametrize("mode", MODES)
def test_after_plain_rounds_acceptance_is_what_it_is_without_any(tokenizer: Tokenizer, mode: str) -> None:
    """The rounds after the return accept draft by draft what they do for a request whose prompt ends there."""
    prompts = heldout_prompts(tokenizer, NUM_REQUESTS, 60)
    options = engine(mode, DRAFT_LEN) | NO_REUSE
    paused = Harness("zoo:llama", **options)
    seen = watch(paused)
    lengths = iter([DRAFT_LEN] * 8 + [0] * PLAIN_ROUNDS)
    paused.parts.draft_len_for = lambda batch_size: next(lengths, DRAFT_LEN)
    requests = submit(paused, prompts)
    while min(len(seen.get(request.request_id, [])) for request in requests) < PLAIN_ROUNDS + 18:
        assert paused.round()
    plain_rounds = [sum(not each.num_drafted for each in seen[r.request_id]) for r in requests]
    assert min(plain_rounds) >= 30
    after: list[list[Seen]] = []
    for request in requests:
        rounds = seen[request.request_id]
        end = max(i for i, each in enumerate(rounds) if not each.num_drafted)
        after.append(rounds[end + 1 :][:ROUNDS_AFTER])
        assert len(rounds) - end > ROUNDS_AFTER

    fresh = Harness("zoo:llama", **options)
    seen_fresh = watch(fresh)
    again = [
        request.tokens[: rounds[0].num_tokens - 1] for request, rounds in zip(requests, after, strict=True)
    ]
    twins = submit(fresh, again)
    while min(len(seen_fresh.get(twin.request_id, [])) for twin in twins) < ROUNDS_AFTER + 2:
        assert fresh.round()
    never_paused = [drafted_rounds(seen_fresh[twin.request_id], 0)[:ROUNDS_AFTER] for twin in twins]
    total, expected = (
        sum(each.num_accepted for run in runs for each in run) for runs in (after, never_paused)
    )
    print(
        f"{mode}: {total} drafts accepted in {ROUNDS_AFTER} rounds after the return, {expected} without a pause"
    )
    assert after == never_paused
    # The old level: that of the rounds before the pause, 8 requests and other places of the same texts.
    before = [each for request in requests for each in seen[request.request_id][1:6]]
    level = sum(each.num_accepted for each in before) / len(before)
    assert total / (NUM_REQUESTS * ROUNDS_AFTER) >= 0.75 * level > 0.4
