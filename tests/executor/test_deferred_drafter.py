"""A draft head that drafts a round later: the drafts are those of the one-model path, and requests
that ended meanwhile leave no trace."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    TOLERANCE,
    SlowDrafter,
    assert_cached_pages_are_whole,
    assert_texts_are,
    draft_entries,
    eagle3,
    pools_of,
    spoil_free_pages,
    submit_traffic,
)
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.models.tiny_eagle3 import write_tiny_eagle3
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.speculative.drafting.deferred_drafter import DeferredDrafter

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_eagle3(tmp_path_factory.mktemp("head"), num_captured=2)


def two_model(head: Path, draft_len: int = 3, **options: Any) -> dict[str, Any]:
    return eagle3(head, draft_len, eagle3_one_model=False, **options)


def drafter_of(harness: Harness) -> DeferredDrafter:
    drafter = harness.parts.drafter
    assert isinstance(drafter, DeferredDrafter) and drafter is harness.parts.runner.round_end
    return drafter


def watch_windows(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[int, int], list[int]]:
    """The bonus token and the real drafts of every window that is launched, by request id and
    length."""
    seen: dict[tuple[int, int], list[int]] = {}
    launch, slots = harness.parts.runner.launch, harness.parts.slots

    def record(batch: ScheduledBatch) -> Any:
        for request in batch.generation_requests:
            num_drafts = min(batch.draft_len, int(slots.num_drafts[request.slot]))
            assert num_drafts == request.py_num_draft_tokens
            window = slots.window[request.slot, : 1 + num_drafts].tolist()
            seen[request.request_id, request.num_tokens] = window
        return launch(batch)

    monkeypatch.setattr(harness.parts.runner, "launch", record)
    return seen


@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["undisturbed", "small_pool"])
@pytest.mark.parametrize("sampling", ["coupled", "greedy"])
def test_the_drafts_are_those_of_the_one_model_path(
    tiny: Path, head: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sampling: str
) -> None:
    windows = []
    for speculation in (
        two_model(head, draft_sampling=sampling),
        eagle3(head, draft_sampling=sampling),
    ):
        harness = Harness(tiny, **options, **speculation, disable_overlap_scheduler=True)
        windows.append(watch_windows(harness, monkeypatch))
        submit_traffic(harness, Random(4), 14)
        harness.run()
        assert bool(harness.parts.scheduler.num_preemptions) == bool(options)
    # In a small pool a cached prefix may be shorter and rounds fall differently, but equal tokens
    # have equal drafts.
    common = windows[0].keys() & windows[1].keys()
    assert len(common) > 60 and (options or len(common) == len(windows[0]) == len(windows[1]))
    lengths = {key: min(len(windows[0][key]), len(windows[1][key])) for key in common}
    assert all(
        windows[0][key][:length] == windows[1][key][:length] for key, length in lengths.items()
    )
    assert sum(length == 4 for length in lengths.values()) > 50


def forbid_foreign_writes(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """While drafts are made, only pages that a living request of the round owns may change, in
    either pool. Returns how many requests of each round were gone."""
    drafter, cache = drafter_of(harness), harness.parts.kv.cache
    prepare: Callable[[ScheduledBatch], None] = drafter.prepare_draft_tokens
    num_gone: list[int] = []

    def watch(batch: ScheduledBatch) -> None:
        pending = drafter._pending
        if pending is None:
            return prepare(batch)
        running = harness.parts.scheduler.running
        alive = [
            request
            for request, (slot, times) in pending.slots.items()
            if request in running and (request.slot, request.num_preemptions) == (slot, times)
        ]
        num_gone.append(len(pending.slots) - len(alive))
        own = {0} | {page for request in alive for page in cache.private_pages(request.request_id)}
        foreign = [page for page in range(cache.num_pages) if page not in own]
        before = [pool.data[:, :, foreign].clone() for pool in pools_of(harness)]
        prepare(batch)
        for pool, data in zip(pools_of(harness), before, strict=True):
            assert torch.equal(pool.data[:, :, foreign], data), (
                "a page of somebody else was written to"
            )
        return None

    monkeypatch.setattr(drafter, "prepare_draft_tokens", watch)
    return num_gone


# With six drafts a preempted request may have its slot again at once, before it was drafted from.
@pytest.mark.parametrize(("draft_len", "seed"), [(3, 0), (3, 1), (6, 2)])
def test_requests_that_ended_or_were_preempted_before_the_draft_write_into_no_page_of_others(
    tiny: Path, head: Path, monkeypatch: pytest.MonkeyPatch, draft_len: int, seed: int
) -> None:
    options = SMALL_POOL | {"max_num_tokens": 40}
    plain, harness = Harness(tiny), Harness(tiny, **options, **two_model(head, draft_len))
    num_gone = forbid_foreign_writes(harness, monkeypatch)
    expected, requests = (submit_traffic(each, Random(seed), 24) for each in (plain, harness))
    plain.run()
    random, cancelled = Random(seed), set()
    while harness.round():
        running = harness.parts.scheduler.running
        if running and random.random() < 0.2:
            victim = random.choice(running)
            cancelled.add(victim)
            harness.queue.cancel(victim.request_id)
    assert sum(num_gone) > 15 and harness.parts.scheduler.num_preemptions and len(cancelled) > 3
    assert_texts_are(requests, expected)
    assert {r for r in requests if r.finish_reason == "cancelled"} <= cancelled
    assert all_pages_are_back(harness.executor)


def assert_entries_are_right(harness: Harness, request: LlmRequest) -> None:
    tokens = request.tokens[: request.draft_kv_len + 1]
    if len(tokens) > 1:
        own = draft_entries(harness, request, len(tokens) - 1)
        assert (own - SlowDrafter(harness, tokens).entries()).abs().max() < TOLERANCE


@pytest.mark.parametrize(("draft_len", "seed"), [(3, 0), (3, 1), (6, 2)])
def test_no_cached_prefix_is_longer_than_what_the_head_has_written(
    tiny: Path, head: Path, draft_len: int, seed: int
) -> None:
    harness = Harness(tiny, **SMALL_POOL | {"max_num_tokens": 40}, **two_model(head, draft_len))
    spoil_free_pages(harness)
    submit_traffic(harness, Random(seed), 16)
    random, num_cached = Random(seed), 0
    for number in range(10_000):
        if not harness.round():
            break
        spoil_free_pages(harness)
        num_cached = max(num_cached, assert_cached_pages_are_whole(harness))
        running = harness.parts.scheduler.running
        for request in running:
            assert request.draft_kv_len <= request.kv_len
            if number % 2 == 0:
                assert_entries_are_right(harness, request)
        if running and random.random() < 0.08:
            harness.queue.cancel(random.choice(running).request_id)
    assert num_cached > 40 and harness.parts.scheduler.num_preemptions
    assert all_pages_are_back(harness.executor)


def test_a_request_that_is_cancelled_before_its_context_was_drafted_from_is_not_cached(
    tiny: Path, head: Path
) -> None:
    harness = Harness(tiny, kv_cache_config={"tokens_per_block": 4}, **two_model(head))
    first = harness.submit(PROMPT, max_tokens=9)
    harness.round()
    assert (first.state, first.kv_len, first.draft_kv_len) == (RequestState.GENERATION, 8, 0)
    harness.queue.cancel(first.request_id)
    harness.run()
    assert harness.parts.kv.cache.match([*PROMPT, 1, 2]) == 0
    second = harness.submit(PROMPT, max_tokens=9)
    harness.round()
    harness.round()
    assert second.draft_kv_len == 8 < second.kv_len
    harness.queue.cancel(second.request_id)
    harness.run()
    assert harness.parts.kv.cache.match([*second.tokens, 1]) == 8


def test_a_round_that_breaks_off_leaves_no_hole_in_the_heads_cache(tiny: Path, head: Path) -> None:
    def fail(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 12:
            raise KeyError("not today")
        return logits

    plain = Harness(tiny)
    harness = Harness(tiny, kv_cache_config={"tokens_per_block": 4}, **two_model(head))
    pairs = [
        [each.submit([i, *PROMPT[1:]], 30, temperature=HOT) for i in (3, 4)]
        for each in (plain, harness)
    ]
    plain.run()
    harness.round()
    bad = harness.submit([1, 2, 3], max_tokens=30, logits_processor=fail)
    while harness.round():
        for request in harness.parts.scheduler.running:
            assert_entries_are_right(harness, request)
            if (
                request.state is RequestState.GENERATION
            ):  # all but the round that is drafted from next
                assert request.kv_len - request.draft_kv_len <= max(4, request.prompt_len)
    assert bad.error == "KeyError: 'not today'"
    assert list(map(output_of, pairs[0])) == list(map(output_of, pairs[1]))


def test_after_a_pause_the_head_drafts_as_if_there_had_been_none(
    tiny: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []
    for company in (False, True):
        harness = Harness(tiny, **two_model(head, max_concurrency=1))
        windows.append(watch_windows(harness, monkeypatch))
        request = harness.submit(PROMPT, max_tokens=50, seed=1)
        if company:
            harness.submit(PROMPT[::-1], max_tokens=15)
        harness.run()
        assert (request.counters.by_drafted[0] > 5) == company
    own = {key: window for key, window in windows[1].items() if key[0] == 1 and len(window) > 1}
    assert len(own) > 15 and all(
        windows[0][key] == window for key, window in own.items() if key in windows[0]
    )
