"""A draft model's own KV cache follows the target though the host reads rounds late: through
preemptions, cancellations, prefix hits, chunks and rounds without drafts."""

from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    TREE,
    assert_cached_pages_are_whole,
    assert_nothing_is_missing,
    assert_texts_are_those_of,
    count_forwards,
    generating,
    one_model,
    spoil_free_pages,
    with_lengths,
)
from tests.executor.harness import Harness, all_pages_are_back, draft_target, output_of
from tests.executor.test_model_drafter import (
    PROMPT,
    draft_kv,
    fresh_keys_and_values,
    keys_and_values,
)
from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD, KVCacheManager
from tllm_spec.executor.speculative.drafting import network_drafter as draft_backlog
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter
from tllm_spec.executor.speculative.drafting.network_drafter import BACKLOG_LEN, Missed, read_missed

MAY_PAUSE = {"draft_len_schedule": {1: 3, 2: 0}}


def spoil_free_draft_pages(kv: KVCacheManager) -> None:
    """A read of a position that was not written since gives NaN."""
    kv.groups[0].pools[0].data[:, :, kv.cache._free_pages[0]] = torch.nan


def assert_the_cache_is_a_prefill(harness: Harness, draft: Path, request: LlmRequest) -> None:
    kv, num_read = draft_kv(harness), request.kv_len + 1 - request.draft_backlog
    own = keys_and_values(kv, request, num_read)
    fresh = fresh_keys_and_values(draft, request.tokens[:num_read])
    assert (own - fresh).abs().max() < 1e-4


def check_that_writes_are_private(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft model never writes to a page that its request does not hold alone."""
    drafter, kv = harness.parts.drafter, draft_kv(harness)
    assert isinstance(drafter, ModelDrafter)
    rows = drafter._net.rows
    build = rows.build

    def watched(*arguments: Any) -> Any:
        metadata, token_ids = build(*arguments)
        running = [each for each in harness.parts.scheduler.running if kv.holds(each)]
        private = [kv.cache.private_pages(request.request_id) for request in running]
        written = set((metadata.kv_slots // rows.page_size).tolist())
        assert written <= {page for pages in private for page in pages}
        return metadata, token_ids

    monkeypatch.setattr(rows, "build", watched)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_the_cache_follows_through_whatever_happens(
    tiny: Path,
    tiny_draft: Path,
    shape: dict[str, Any],
    seed: int,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = LATE_DRAFT_MODEL_SMALL | {"disable_overlap_scheduler": not overlap}
    options |= draft_target(tiny_draft, 3, **MAY_PAUSE, **shape)
    harness, plain = Harness(tiny, **options), Harness(tiny, **LATE_DRAFT_MODEL_SMALL)
    kv, random, plan = draft_kv(harness), Random(seed), Random(seed)
    check_that_writes_are_private(harness, monkeypatch)
    draft_len = left = num_checked = 0
    harness.parts.tier_for = lambda *_: draft_len
    requests: list[LlmRequest] = []
    for number in range(400):
        if not left:
            draft_len = plan.choice((0, 2, 3, 3))
            left = plan.randrange(1, 30)
        left -= 1
        if number % 12 == 0:
            finished = [request for request in requests if request.is_finished]
            requests += late_draft_model_conversations(
                harness, random, finished, random.randrange(3)
            )
        harness.round()
        harness.executor.check_integrity()
        spoil_free_draft_pages(kv)
        for request in generating(harness) if number % 12 == 0 else []:
            if request.kv_len >= request.draft_backlog and kv.holds(request):
                assert_the_cache_is_a_prefill(harness, tiny_draft, request)
                num_checked += 1
        if random.random() < 0.02 and (running := generating(harness)):
            harness.queue.cancel(random.choice(running).request_id)
    harness.run()
    assert num_checked > 15 and len(requests) > 25
    assert harness.parts.scheduler.num_preemptions
    assert sum(request.cached_tokens for request in requests) > 200
    assert kv.cache.stats.reused_tokens > 200
    assert {request.finish_reason for request in requests} == {"length", "cancelled"}
    assert sum(sum(request.counters.by_accepted[1:]) for request in requests) > 10
    assert_texts_are_those_of(plain, requests)


@pytest.mark.covering
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [4, 16])
def test_a_target_that_drafts_for_itself_is_always_right_whenever_drafting_resumes(
    tiny: Path, page_size: int, overlap: bool
) -> None:
    """Not one draft is rejected: nothing is missing in its cache after rounds without drafts."""
    cache = {"tokens_per_block": page_size}
    options = {"disable_overlap_scheduler": not overlap, "kv_cache_config": cache}
    harness, random = Harness(tiny, **options, **draft_target(tiny, 4)), Random(5)
    lengths: list[int] = []
    harness.parts.tier_for = lambda *_: lengths.pop()
    requests = [harness.submit([i, *PROMPT], max_tokens=200) for i in range(3)]
    for _ in range(120):
        if not lengths:
            lengths = [random.choice((0, 1, 3, 4))] * random.choice((1, 1, 2, 9))
        harness.round()
    harness.parts.tier_for = lambda *_: 4
    harness.run()
    for request in requests:
        stats, by_drafted = request.counters.stats(), request.counters.by_drafted
        assert by_drafted[0] > 10 and all(by_drafted[i] for i in (1, 3, 4))
        # The last round may have more drafts than the text has tokens left.
        assert stats.num_drafted_tokens - stats.num_accepted_tokens <= 4


def test_where_draft_pages_are_short_a_request_goes_on_without_drafts_until_they_come_back(
    tiny: Path,
) -> None:
    cache = {"tokens_per_block": 4, "max_tokens": 128}
    harness = Harness(tiny, kv_cache_config=cache, **draft_target(tiny, 3))
    kv = draft_kv(harness)
    hog = LlmRequest(
        request_id=99, tokens=[60] * 120, rules=harness.submit([1], 1).rules, seed=0, slot=7
    )
    kv.start(hog)
    assert kv.extend(hog, 116)
    request = harness.submit(PROMPT, max_tokens=80)
    while request.num_output_tokens < 30:
        harness.round()
    assert sum(request.counters.by_drafted[1:]) <= 2, "there were pages for a few tokens"
    kv.free_resources(hog)
    harness.run()
    stats = request.counters.stats()
    assert stats.num_drafted_tokens - stats.num_accepted_tokens <= 3
    assert request.counters.by_accepted[3] >= (80 - 31) // 4
    assert_texts_are_those_of(Harness(tiny), [request])


def test_most_rounds_send_no_page_numbers(tiny: Path) -> None:
    cache = {"tokens_per_block": 4}
    harness = Harness(tiny, kv_cache_config=cache, **draft_target(tiny, 3))
    requests = [harness.submit([i] * (3 + i), max_tokens=160) for i in range(6)]
    for request in requests:
        harness.run_until(request, RequestState.GENERATION)
    table, sent = draft_kv(harness).groups[0].table, []
    flush = table.flush

    def watched() -> None:
        sent.append(bool(table._changed))
        flush()

    table.flush = watched  # type: ignore[method-assign] # the test looks on
    harness.rounds(30)
    assert len(sent) >= 30 and 1 <= sum(sent) <= 6


def test_a_round_that_breaks_off_leaves_the_draft_cache_usable(tiny: Path) -> None:
    """The drafts of its requests were made, and a joining request's context was read."""
    fuse: dict[str, Any] = {"lit": False}

    def raise_if_lit(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if fuse["lit"]:
            raise LookupError("lit")
        return logits

    harness = Harness(tiny, max_num_tokens=40, enable_chunked_prefill=True, **draft_target(tiny, 3))
    draft_len = 0
    harness.parts.tier_for = lambda *_: draft_len
    requests = [harness.submit([i, *PROMPT], max_tokens=60) for i in range(2)]
    harness.rounds(8)
    culprit = harness.submit([9], max_tokens=9, logits_processor=raise_if_lit)
    joining = harness.submit([7, *PROMPT] * 9, max_tokens=30)
    draft_len = 3  # drafting resumes in the round that breaks off
    fuse["lit"] = True
    harness.round()
    assert joining.draft_backlog < 0 == joining.kv_len
    requests.append(joining)
    assert culprit.error == "LookupError: lit"
    harness.run()
    for request in requests:
        stats = request.counters.stats()
        assert request.finish_reason == "length" and stats.num_drafted_tokens > 20
        assert stats.num_drafted_tokens - stats.num_accepted_tokens <= 3


@pytest.mark.thinned
@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_pauses_drafts_again_with_nothing_missing(
    tiny: Path, tiny_draft: Path, overlap: bool
) -> None:
    options = draft_target(tiny_draft, 3) | {"disable_overlap_scheduler": not overlap}
    harness, plain = Harness(tiny, **options), Harness(tiny)
    ours, theirs = (
        [each.submit([i, *PROMPT], max_tokens=80, patience=1) for i in range(4)]
        for each in (harness, plain)
    )
    for number in count():
        if not harness.round():
            break
        for request in generating(harness) if number % 7 == 0 else []:
            if request.kv_len >= request.draft_backlog:
                assert_the_cache_is_a_prefill(harness, tiny_draft, request)
    plain.run()
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    assert all(request.counters.by_drafted[0] > 5 for request in ours)
    assert all(request.counters.by_drafted[3] > 2 for request in ours)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_short_text_is_read_from_its_beginning_when_drafts_of_trees_resume(
    tiny: Path, overlap: bool
) -> None:
    """A round of trees may write more positions again than the text has tokens."""
    options = draft_target(tiny, 6, draft_len_schedule={1: 6, 2: 0}, **TREE)
    harness = Harness(tiny, disable_overlap_scheduler=not overlap, **options)
    lengths = iter((6, 6, 0, 0))
    harness.parts.tier_for = lambda *_: next(lengths, 6)
    # The target writes nothing but a token that is never drafted.
    request = harness.submit([5], max_tokens=12, logit_bias={7: 1e9})
    harness.run()
    assert request.error is None and output_of(request) == [7] * 12
    assert request.counters.by_drafted[0] == 2 and request.counters.by_drafted[6] > 5


@pytest.mark.parametrize("overlap", [True, False])
def test_rejected_drafts_give_their_draft_pages_back(
    tiny: Path, tiny_draft: Path, overlap: bool
) -> None:
    options = draft_target(tiny_draft, 7) | {"disable_overlap_scheduler": not overlap}
    harness = Harness(tiny, kv_cache_config={"tokens_per_block": 4}, **options)
    lengths, kv = iter([7] * 8 + [1] * 100), draft_kv(harness)
    harness.parts.tier_for = lambda *_: next(lengths)
    request = harness.submit(PROMPT, max_tokens=60)
    held = []
    while harness.round():
        if request.state is RequestState.GENERATION:
            ahead = request.tokens_in_flight + (1 + ROUNDS_AHEAD) * 2 if overlap else 0
            held.append(kv.held(request)[0] - kv.cache.pages_for(request.kv_len + ahead))
    assert len(held) > 30 and max(held[12:] if overlap else held) <= 0
    assert all_pages_are_back(harness.executor)


def test_a_prompt_is_read_once_whatever_its_chunks(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = draft_target(tiny_draft, 3) | {"enable_chunked_prefill": True, "max_num_tokens": 16}
    harness, starts, ends = Harness(tiny, **options), list[int](), list[int]()
    forward = DraftNet.forward

    def watched(
        layers: DraftNet, chunks: list[ContextChunk], *others: Any, **options: Any
    ) -> torch.Tensor:
        starts.extend(chunk.start for chunk in chunks)
        ends.extend(chunk.end for chunk in chunks)
        return forward(layers, chunks, *others, **options)

    monkeypatch.setattr(DraftNet, "forward", watched)
    harness.submit(list(range(60)), max_tokens=30)
    harness.run()
    assert starts == [0, 16, 32, 48] and ends == [16, 32, 48, 60]


# A draft model on the target's pages reads nothing in rounds without drafts. Before the next round
# with drafts it reads all that it missed, and until then nothing of that is a reusable prefix.


LATE_DRAFT_MODEL_PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
LATE_DRAFT_MODEL_SMALL = SMALL_POOL | {
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 170}
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


def late_draft_model_conversations(
    harness: Harness, random: Random, earlier: list[LlmRequest], number: int
) -> list[LlmRequest]:
    """Requests whose prompts begin with an earlier request's text, or with most of it."""
    requests = []
    for index in range(number):
        text = random.choice(earlier).tokens if earlier else LATE_DRAFT_MODEL_PROMPT
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
    options = LATE_DRAFT_MODEL_SMALL | ({} if overlap else {"disable_overlap_scheduler": True})
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
            requests += late_draft_model_conversations(
                harness, random, finished, random.randrange(3)
            )
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


def test_missed_tokens_are_read_in_forwards_of_at_most_max_num_tokens(
    tiny: Path, speculation: dict[str, Any]
) -> None:
    harness = Harness(tiny, max_num_tokens=20, **speculation)
    with_lengths(harness, 0)
    requests = [
        harness.submit([number, *LATE_DRAFT_MODEL_PROMPT], max_tokens=60) for number in range(2)
    ]
    harness.rounds(40)
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
    harness = Harness(tiny, **speculation, **LATE_DRAFT_MODEL_SMALL)
    with_lengths(harness, 0)
    request = harness.submit(LATE_DRAFT_MODEL_PROMPT, max_tokens=60, temperature=HOT, seed=3)
    harness.rounds(30)
    harness.executor._complete_rounds(0)
    harness.parts.scheduler._preempt(request, harness.executor._scheduled)
    # It has read the prompt, and the first token with it.
    assert harness.parts.kv.cache.match(request.tokens) == len(LATE_DRAFT_MODEL_PROMPT) + 1
    read = watch_tokens(monkeypatch)
    harness.round()
    harness.round()
    assert request.draft_backlog == 0 and not read
    assert_nothing_is_missing(harness, request)
    harness.run()
    reference = Harness(tiny)
    expected = reference.submit(LATE_DRAFT_MODEL_PROMPT, max_tokens=60, temperature=HOT, seed=3)
    reference.run()
    assert output_of(request) == output_of(expected)
