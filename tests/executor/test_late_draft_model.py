"""A draft model on the target's pages reads nothing in rounds without drafts. Before the next round
with drafts it reads all that it missed, and until then nothing of that is a reusable prefix."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.draft_caches import (
    HOT,
    assert_cached_pages_are_whole,
    assert_nothing_is_missing,
    assert_texts_are_those_of,
    count_forwards,
    generating,
    one_model,
    spoil_free_pages,
    with_lengths,
)
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.drafting import network_drafter as draft_backlog
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN, Missed, read_missed

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
MAY_PAUSE = {"draft_len_schedule": {1: 3, 2: 0}}
SMALL = {
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 170},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
    "max_batch_size": 4,
    "max_num_tokens": 24,
    "enable_chunked_prefill": True,
}


@pytest.fixture
def speculation(tiny_draft: Path) -> dict[str, Any]:
    return one_model(tiny_draft, tiny_draft, "draft_target", **MAY_PAUSE)


def watch_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens are read from the host's tokens, each time."""
    seen: list[int] = []

    def watched(layers: DraftNet, missed: list[Missed], max_num_tokens: int) -> None:
        seen.extend([sum(end - start for _, start, end in missed)] if missed else [])
        read_missed(layers, missed, max_num_tokens)

    monkeypatch.setattr(draft_backlog, "read_missed", watched)
    return seen


def conversations(
    harness: Harness, random: Random, earlier: list[LlmRequest], number: int
) -> list[LlmRequest]:
    """Requests whose prompts begin with an earlier request's text, or with most of it."""
    requests = []
    for index in range(number):
        text = random.choice(earlier).tokens if earlier else PROMPT
        begin = text[: len(text) - random.choice((0, 0, 3))][:60]
        new = [random.randrange(64) for _ in range(random.randrange(1, 6))]
        temperature = HOT if index % 3 else None
        requests.append(
            harness.submit([*begin, *new], random.randrange(1, 70), temperature=temperature)
        )
    return requests


@pytest.mark.slow
@pytest.mark.thinned(4)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_draft_model_has_read_all_it_missed_when_it_drafts(
    tiny: Path,
    speculation: dict[str, Any],
    seed: int,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With preemptions, cancellations, prefix hits and chunks. Free pages hold NaN."""
    options = SMALL | ({} if overlap else {"disable_overlap_scheduler": True})
    harness, plain = Harness(tiny, **options, **speculation), Harness(tiny, **options)
    random, seen = Random(seed), set[str]()
    draft_len, plan = 0, Random(seed)
    harness.parts.tier_for = lambda *_: draft_len
    preempt = harness.parts.scheduler._preempt

    def watched(victim: LlmRequest, *others: Any) -> None:
        seen.update(["preempted"] if victim.draft_backlog > BACKLOG_LEN else [])
        preempt(victim, *others)

    harness.parts.scheduler._preempt = watched  # type: ignore[method-assign] # the test looks on
    read = watch_tokens(monkeypatch)
    requests: list[LlmRequest] = []
    left = 0
    for number in range(800):
        if not left:
            draft_len = plan.choice((0, 0, 2, 3))
            left = plan.randrange(1, 60) if not draft_len else plan.randrange(1, 6)
        left -= 1
        if number % 20 == 0:
            finished = [request for request in requests if request.is_finished]
            requests += conversations(harness, random, finished, random.randrange(3))
        harness.round()
        spoil_free_pages(harness)
        assert_cached_pages_are_whole(harness)
        if number % 3 == 0:
            begun = [each for each in generating(harness) if each.num_output_tokens]
            assert_nothing_is_missing(harness, *begun)
        if random.random() < 0.005 and (running := generating(harness)):
            harness.queue.cancel(random.choice(running).request_id)
    harness.run()
    assert seen == {"preempted"} and read
    assert len(requests) > 25 and sum(request.cached_tokens for request in requests) > 200
    assert sum(sum(request.counters.by_accepted[1:]) for request in requests) > 0
    assert_texts_are_those_of(plain, requests)
    assert all_pages_are_back(harness.executor)


def test_missed_tokens_are_read_in_forwards_of_at_most_max_num_tokens(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    harness = Harness(tiny, max_num_tokens=20, **speculation)
    with_lengths(harness, 0)
    requests = [harness.submit([number, *PROMPT], max_tokens=60) for number in range(2)]
    for _ in range(40):
        harness.round()
    assert all(request.draft_backlog > 2 * BACKLOG_LEN for request in requests)
    missing = sum(request.draft_backlog for request in requests)
    rows = count_forwards(harness)
    with_lengths(harness, 3)
    harness.round()
    from_tokens = missing - 2 * BACKLOG_LEN
    assert rows[:-5] == [20, 20, from_tokens - 40]
    assert rows[-5:] == [BACKLOG_LEN, BACKLOG_LEN, 8, 2, 2]
    assert_nothing_is_missing(harness, *requests)


def test_a_preempted_request_keeps_the_pages_that_its_draft_model_has_read(
    tiny: Path, speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tiny, **speculation, **SMALL)
    with_lengths(harness, 0)
    request = harness.submit(PROMPT, max_tokens=60, temperature=HOT, seed=3)
    for _ in range(30):
        harness.round()
    harness.executor._complete_rounds(0)
    harness.parts.scheduler._preempt(request, harness.executor._scheduled)
    # It has read the prompt, and the first token with it.
    assert harness.parts.kv.cache.match(request.tokens) == len(PROMPT) + 1
    read = watch_tokens(monkeypatch)
    harness.round()
    harness.round()
    assert request.draft_backlog == 0 and not read
    assert_nothing_is_missing(harness, request)
    harness.run()
    reference = Harness(tiny)
    expected = reference.submit(PROMPT, max_tokens=60, temperature=HOT, seed=3)
    reference.run()
    assert output_of(request) == output_of(expected)
