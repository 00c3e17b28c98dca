"""A draft head that drafts a round later, in rounds without drafts: it reads many of them at once,
and then has read what it would have."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    SMALL_POOL,
    TOLERANCE,
    SlowDrafter,
    assert_cached_pages_are_whole,
    assert_texts_are,
    count_forwards,
    draft_entries,
    generating,
    one_model,
    random_lengths,
    spoil_free_pages,
    submit_traffic,
    with_lengths,
    worker_of,
)
from tests.executor.harness import Harness, all_pages_are_back
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.speculative.drafting.draft_backlog import BACKLOG_LEN

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
PAGES = {"kv_cache_config": {"tokens_per_block": 4}}


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_eagle3(tmp_path_factory.mktemp("head"), num_captured=2)


@pytest.fixture
def speculation(tiny_draft: Path, head: Path) -> dict[str, Any]:
    """Whose rounds may have no drafts."""
    return one_model(tiny_draft, head, "eagle3_two_model", draft_len_schedule={1: 3, 2: 0})


def assert_the_head_has_read(harness: Harness, request: LlmRequest) -> None:
    """As far as it says."""
    tokens = request.tokens[: request.draft_kv_len + 1]
    own = draft_entries(harness, request, len(tokens) - 1)
    assert (own - SlowDrafter(harness, tokens).entries()).abs().max() < TOLERANCE


def test_plain_rounds_run_no_forward_of_the_head_but_one_for_many(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    harness = Harness(tiny, **speculation)
    with_lengths(harness, 0)
    rows = count_forwards(harness)
    request = harness.submit(PROMPT, max_tokens=150)
    harness.round()
    harness.round()
    assert rows == [len(PROMPT)]
    del rows[:]
    for number in range(1, 3 * BACKLOG_LEN + 2):
        harness.round()
        assert rows == [BACKLOG_LEN] * (number % BACKLOG_LEN == 0), number
        assert request.draft_backlog == number % BACKLOG_LEN
        assert request.draft_kv_len == len(PROMPT) + number - number % BACKLOG_LEN
        del rows[:]
    # Before the next round, which drafts: what waits, then the last position once more and the
    # drafts after the first.
    with_lengths(harness, 3)
    harness.round()
    assert rows == [BACKLOG_LEN, 1, 1, 1]
    assert request.draft_backlog == 0
    assert_the_head_has_read(harness, request)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_heads_cache_lacks_nothing_but_what_waits(
    tiny: Path, speculation: dict[str, Any], seed: int
) -> None:
    """Joins, chunks of contexts beside windows, prefix hits, preemption, cancellation and
    surprising ends."""
    pool = {"kv_cache_config": {"tokens_per_block": 4, "max_tokens": 92}}
    plain, harness = Harness(tiny), Harness(tiny, **SMALL_POOL | pool, **speculation)
    expected, requests = (submit_traffic(each, Random(seed), 40) for each in (plain, harness))
    plain.run()
    backlog = worker_of(harness)._backlog
    assert backlog is not None and backlog._rings.states is not None
    backlog._rings.states.fill_(torch.nan)  # what nobody has put there shows
    random, waited = Random(seed), set[int]()
    with_lengths(harness, random_lengths(random))
    spoil_free_pages(harness)
    for number in range(10_000):
        if not harness.round():
            break
        spoil_free_pages(harness)
        assert_cached_pages_are_whole(harness)
        running = generating(harness)
        for request in running:
            waited.add(request.draft_backlog)
            assert request.draft_kv_len <= request.kv_len
            if request.draft_kv_len and number % 2 == 0:
                assert_the_head_has_read(harness, request)
        if running and random.random() < 0.01:
            harness.queue.cancel(random.choice(running).request_id)
    assert waited >= set(range(BACKLOG_LEN - 4)) and BACKLOG_LEN not in waited, (
        "a full ring is read at once"
    )
    assert harness.parts.scheduler.num_preemptions
    assert sum(request.cached_tokens for request in requests) > 40
    assert_texts_are(requests, expected)
    assert sum(sum(request.counters.by_accepted[1:]) for request in requests) > 0
    assert all_pages_are_back(harness.executor)


def test_a_prefix_ends_where_the_head_has_come_to(tiny: Path, speculation: dict[str, Any]) -> None:
    harness = Harness(tiny, **PAGES, **speculation)
    with_lengths(harness, 0)
    first = harness.submit(PROMPT, max_tokens=BACKLOG_LEN + 8)
    harness.run()
    expected = len(PROMPT) + BACKLOG_LEN
    assert harness.parts.kv.cache.match([*first.tokens, 1, 2]) == expected
    with_lengths(harness, 3)
    second = harness.submit([*first.tokens, 1, 2], max_tokens=3)
    while harness.round():
        if second in generating(harness) and second.draft_kv_len:
            assert_the_head_has_read(harness, second)
    assert second.cached_tokens == expected


@pytest.mark.parametrize("later", [[3, 3], [3, 0], [0, 3]])
def test_a_round_that_breaks_off_leaves_no_hole_behind_what_waits(
    tiny: Path, speculation: dict[str, Any], later: list[int]
) -> None:
    def fail(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 5:
            raise KeyError("not today")
        return logits

    harness = Harness(tiny, **PAGES, **speculation)
    with_lengths(harness, 0)
    request = harness.submit(PROMPT, max_tokens=40)
    for _ in range(6):
        harness.round()
    bad = harness.submit([1, 2, 3], max_tokens=30, logits_processor=fail)
    while not bad.is_finished:
        harness.round()
    assert bad.error == "KeyError: 'not today'" and request.draft_backlog > 3
    lengths = iter(later)
    harness.parts.draft_len_for = lambda *_: next(lengths, 0)
    while harness.round():
        if request in generating(harness):
            assert_the_head_has_read(harness, request)
    assert request.num_output_tokens == 40


def test_a_preempted_request_has_nothing_waiting(tiny: Path, speculation: dict[str, Any]) -> None:
    harness = Harness(tiny, **SMALL_POOL, **speculation)
    with_lengths(harness, 0)
    requests = [harness.submit([i, *PROMPT], max_tokens=24) for i in range(4)]
    while not harness.parts.scheduler.num_preemptions:
        harness.round()
    [waiting] = [request for request in requests if request.num_preemptions and request.slot < 0]
    assert waiting.draft_backlog == 0
    harness.run()
    assert all(request.num_output_tokens == 24 for request in requests)
