"""Rounds that overlap: the next one is launched before the host has read the one before, and nobody
can tell."""

from collections.abc import Callable
from functools import cache
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
    draft_entries,
    one_model,
    pools_of,
    spoil_free_pages,
    submit_traffic,
)
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.tiny_llama import write_tiny_llama
from tests.models.tiny_eagle3 import rewrite, write_tiny_eagle3
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.engine.rows import RowBuilder
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.response import Response
from tllm_spec.executor.rounds.launched_round import LaunchedRound
from tllm_spec.executor.rounds.transfer import ToHost

PROMPT = [3, 14, 15, 9, 26, 5, 35]
PAGE = {"kv_cache_config": {"tokens_per_block": 4}}
NAN_TOKEN = 63
NO_OVERLAP = {"disable_overlap_scheduler": True}
Make = Callable[..., Harness]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, but after one of its tokens there are no numbers."""
    return write_tiny_llama(tmp_path_factory.mktemp("nan"), nan_token=NAN_TOKEN)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Often of the target's opinion, and never for the token that is no number."""
    return write_tiny_llama(tmp_path_factory.mktemp("draft"), vocab_size=NAN_TOKEN)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_eagle3(tmp_path_factory.mktemp("head"), num_captured=2)
    rewrite(folder, lambda tensors: tensors.update(d2t=torch.zeros(48, dtype=torch.int64)))
    return folder


@pytest.fixture(scope="module", params=["plain", "draft_target", "eagle3"])
def make(request: pytest.FixtureRequest, tiny: Path, draft: Path, head: Path) -> Make:
    """A harness of one of the modes whose rounds overlap."""

    def make(target: Path = tiny, **options: Any) -> Harness:
        harness = Harness(target, **PAGE | options, **one_model(draft, head, request.param))
        assert harness.parts.max_in_flight == int("disable_overlap_scheduler" not in options)
        return harness

    return make


def before_launch(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, look: Callable[..., None]
) -> None:
    launch = harness.parts.runner.launch

    def watched(batch: ScheduledBatch) -> LaunchedRound:
        look(batch)
        return launch(batch)

    monkeypatch.setattr(harness.parts.runner, "launch", watched)


def num_rounds_with(harness: Harness, request: LlmRequest) -> int:
    """Rounds in flight that bring the request at least one token."""
    return sum(
        request in launched.ended_contexts or request in launched.batch.generation_requests
        for launched in harness.executor._in_flight
    )


def assert_same_text(ours: list[LlmRequest], theirs: list[LlmRequest]) -> None:
    assert not [request.error for request in ours if request.error]
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    assert [r.finish_reason for r in ours] == [r.finish_reason for r in theirs]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_round_is_launched_before_the_one_before_it_is_read(
    make: Make, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    harness = make(**({} if overlap else NO_OVERLAP))
    events: list[str] = []
    rounds: list[ToHost] = []
    launch, wait = harness.parts.runner.launch, ToHost.wait

    def watched_launch(batch: ScheduledBatch) -> LaunchedRound:
        launched = launch(batch)
        events.append(f"launch {len(rounds)}")
        rounds.append(launched.to_host)
        return launched

    def watched_wait(to_host: ToHost) -> list[torch.Tensor]:
        events.append(f"read {rounds.index(to_host)}")
        return wait(to_host)

    monkeypatch.setattr(harness.parts.runner, "launch", watched_launch)
    monkeypatch.setattr(ToHost, "wait", watched_wait)
    harness.submit(PROMPT, max_tokens=9, draft_limit=0)
    harness.run()
    if overlap:
        between = [event for i in range(8) for event in (f"launch {i + 1}", f"read {i}")]
        assert events == ["launch 0", *between, "read 8"]
    else:
        assert events == [event for i in range(9) for event in (f"launch {i}", f"read {i}")]


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
@pytest.mark.parametrize("seed", range(2))
def test_rounds_in_flight_write_only_to_private_pages_that_their_requests_hold(
    make: Make, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
) -> None:
    options = SMALL_POOL | {"scheduler_config": {"capacity_scheduler_policy": policy}}
    harness = make(**options)
    kv, slots = harness.parts.kv, harness.parts.slots
    written: list[torch.Tensor] = []
    build, launch = RowBuilder.build, harness.parts.runner.launch

    def watched_build(*arguments: Any) -> Any:
        metadata, token_ids = build(*arguments)
        written.append(metadata.kv_slots // 4)
        return metadata, token_ids

    def watched_launch(batch: ScheduledBatch) -> LaunchedRound:
        for request in batch.requests():
            pages, end = kv.cache.pages(request.request_id), request.kv_len + request.context_chunk
            assert kv.table.device_rows[request.slot, : len(pages)].tolist() == pages
            if request in batch.generation_requests:
                assert request.kv_len <= slots.kv_lens[request.slot] < request.num_tokens_bound
                end = int(slots.kv_lens[request.slot]) + batch.window
            assert end + kv.extra_kv_tokens <= len(pages) * 4
        written.clear()
        launched = launch(batch)
        owned = [kv.cache.private_pages(request.request_id) for request in batch.requests()]
        assert set(torch.cat(written).tolist()) <= {page for pages in owned for page in pages}
        return launched

    monkeypatch.setattr(RowBuilder, "build", watched_build)
    monkeypatch.setattr(harness.parts.runner, "launch", watched_launch)
    spoil_free_pages(harness)
    requests = submit_traffic(harness, Random(seed), 24)
    while harness.round():
        harness.executor.check_integrity()
        spoil_free_pages(harness)
    assert bool(harness.parts.scheduler.num_preemptions) == (policy == "MAX_UTILIZATION")
    assert all_pages_are_back(harness.executor)
    alone = make(**NO_OVERLAP)
    expected = submit_traffic(alone, Random(seed), 24)
    alone.run()
    assert_same_text(requests, expected)


def test_a_request_that_is_known_to_finish_by_its_length_is_not_launched_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    num_launches: dict[int, int] = {}

    def look(batch: ScheduledBatch) -> None:
        for request in batch.requests():
            assert (
                request.num_output_tokens + num_rounds_with(harness, request) < request.max_tokens
            )
            num_launches[request.request_id] = num_launches.get(request.request_id, 0) + 1

    before_launch(harness, monkeypatch, look)
    speculating = [
        harness.submit([i, *PROMPT], max_tokens=i + 1, temperature=HOT) for i in range(20)
    ]
    plain = [harness.submit([i, *PROMPT], max_tokens=i + 1, draft_limit=0) for i in range(12)]
    harness.run()
    assert not [request.error for request in speculating + plain if request.error]
    assert [num_launches[request.request_id] for request in plain] == list(range(1, 13))
    assert [request.num_output_tokens for request in speculating] == list(range(1, 21))


def text_alone(make: Make, prompt: list[int], max_tokens: int, **params: Any) -> list[int]:
    harness = make(**NO_OVERLAP)
    request = harness.submit(prompt, max_tokens, **params)
    harness.run()
    return output_of(request)


def test_the_round_too_many_of_a_finished_request_harms_neither_who_gets_its_pages_nor_what_is_cached(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_alone(make, PROMPT, 30, temperature=HOT, seed=4)
    stop = next(i for i in range(8, 30) if text[i] not in text[:i])
    harness = make(max_batch_size=1, kv_cache_config={"tokens_per_block": 4, "max_tokens": 96})
    first = harness.submit(PROMPT, 30, temperature=HOT, seed=4, stop_token_ids=[text[stop]])
    second = harness.submit([50, 51], 30, temperature=HOT, seed=5)
    launched: list[LlmRequest] = []
    spoilt: list[int] = []
    before_launch(harness, monkeypatch, lambda batch: launched.extend(batch.requests()))
    respond = harness.executor._respond

    def spoil(responses: list[Response]) -> None:
        respond(responses)
        if first.is_finished and not spoilt:
            assert launched[-1] is first and harness.executor._in_flight[-1].batch.requests() == [
                first
            ]
            spoil_free_pages(harness)
            spoilt.append(len(launched))

    monkeypatch.setattr(harness.executor, "_respond", spoil)
    harness.run()
    assert launched[spoilt[0]] is second  # at once, in the only slot
    assert output_of(first) == text[: stop + 1] and first.finish_reason == "stop"
    assert output_of(second) == text_alone(make, [50, 51], 30, temperature=HOT, seed=5)
    third = harness.submit([*first.tokens, 1], 20)
    harness.run_until(third, RequestState.GENERATION)
    assert third.cached_tokens >= len(first.tokens) - 2
    while third.num_output_tokens < 2:
        harness.round()
    if len(pools_of(harness)) == 2:
        reference = SlowDrafter(harness, third.tokens)
        own = draft_entries(harness, third, reference.num_entries)
        assert (own - reference.entries()).abs().max() < TOLERANCE
    harness.run()
    assert output_of(third) == text_alone(make, [*first.tokens, 1], 20)


GOOD: dict[str, Any] = {
    "logit_bias": {NAN_TOKEN: -100.0},
    "presence_penalty": 0.5,
    "temperature": 0.9,
}


@cache
def good_texts(make: Make, num_requests: int = 3) -> list[list[int]]:
    return [text_alone(make, [i, *PROMPT], 24, seed=i, **GOOD) for i in range(num_requests)]


def submit_good(harness: Harness, num_requests: int = 3) -> list[LlmRequest]:
    return [harness.submit([i, *PROMPT], 24, seed=i, **GOOD) for i in range(num_requests)]


@pytest.mark.parametrize(
    ("prompt", "params", "output"),
    [([1, NAN_TOKEN, 2], {}, []), ([1, 2, 3], {"logit_bias": {NAN_TOKEN: 1000.0}}, [NAN_TOKEN])],
    ids=["in_its_context", "in_a_later_round"],
)
def test_a_request_without_numbers_fails_alone_though_its_next_round_is_in_flight(
    make: Make,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    prompt: list[int],
    params: dict[str, Any],
    output: list[int],
) -> None:
    harness = make(model)
    others = submit_good(harness)
    for _ in range(4):
        harness.round()
    bad = harness.submit(prompt, 20, **params)
    late = harness.submit([0, *PROMPT], 24, seed=0, **GOOD)
    launched: list[LlmRequest] = []
    before_launch(harness, monkeypatch, lambda batch: launched.extend(batch.requests()))
    while not bad.is_finished:
        harness.round()
    assert launched.count(bad) == 2 + len(output) and harness.executor._in_flight
    assert (
        bad.error is not None and "no token can be chosen" in bad.error and output_of(bad) == output
    )
    harness.run()
    expected = good_texts(make)
    assert list(map(output_of, [*others, late])) == [*expected, expected[0]]
    assert all_pages_are_back(harness.executor)


@pytest.mark.parametrize("num_rounds", [1, 2, 5])
def test_a_request_may_be_cancelled_while_a_round_of_it_is_in_flight(
    make: Make, num_rounds: int
) -> None:
    harness = make(max_batch_size=4)
    others = submit_good(harness)
    victim = harness.submit([9, *PROMPT], 24)
    waiting = harness.submit([0, *PROMPT], 24, seed=0, **GOOD)
    for _ in range(num_rounds):
        harness.round()
    slot = victim.slot
    assert num_rounds_with(harness, victim) == 1 and waiting.slot == -1
    harness.queue.cancel(victim.request_id)
    harness.round()
    spoil_free_pages(harness)
    assert victim.finish_reason == "cancelled" and waiting.slot == slot
    num_tokens = victim.num_tokens
    harness.run()
    assert victim.num_tokens == num_tokens and len(harness.responses[victim.request_id]) == 1
    expected = good_texts(make)
    assert list(map(output_of, [*others, waiting])) == [*expected, expected[0]]
    assert all_pages_are_back(harness.executor)


def test_a_newcomer_whose_processor_raises_costs_nobody_the_round_in_flight(make: Make) -> None:
    in_flight: list[int] = []

    def fail(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        in_flight.append(len(harness.executor._in_flight))
        raise KeyError("not today")

    harness = make()
    others = submit_good(harness)
    for _ in range(5):
        harness.round()
    bad = harness.submit([8, *PROMPT], 9, logits_processor=fail)
    joining = harness.submit(
        [0, *PROMPT], 24, seed=0, **GOOD
    )  # its context ends in the round that breaks off
    harness.round()
    assert in_flight == [1] and bad.error == "KeyError: 'not today'"
    assert joining.state is RequestState.CONTEXT and not joining.num_output_tokens
    harness.run()
    expected = good_texts(make)
    assert list(map(output_of, [*others, joining])) == [*expected, expected[0]]
    assert all_pages_are_back(harness.executor)


def test_when_launching_fails_for_nobodys_fault_who_was_only_in_the_round_in_flight_gets_its_tokens(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = make()
    ending, going_on = harness.submit(PROMPT, 5, draft_limit=0), harness.submit([9, *PROMPT], 24)
    expected = [text_alone(make, PROMPT, 5), text_alone(make, [9, *PROMPT], 24)]
    prepare = harness.parts.drafter.prepare_draft_tokens

    def fail(batch: ScheduledBatch) -> None:
        if ending not in batch.requests():
            assert num_rounds_with(harness, ending) and ending.num_output_tokens < 5
            raise OSError("no drafts today")
        prepare(batch)

    monkeypatch.setattr(harness.parts.drafter, "prepare_draft_tokens", fail)
    while not going_on.is_finished:
        harness.round()
    assert going_on.error == "OSError: no drafts today" and ending.finish_reason == "length"
    assert output_of(ending) == expected[0]
    assert output_of(going_on) and output_of(going_on) == expected[1][: going_on.num_output_tokens]
    assert not harness.executor._in_flight and all_pages_are_back(harness.executor)
    monkeypatch.undo()
    again = harness.submit([9, *PROMPT], 24)
    harness.run()
    assert output_of(again) == expected[1]


def test_a_request_preempted_with_tokens_in_flight_goes_on_where_it_stood(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, alone = make(**SMALL_POOL), make(**NO_OVERLAP)
    preempt = harness.parts.scheduler._preempt
    in_flight: list[int] = []

    def watched(victim: LlmRequest, batch: ScheduledBatch) -> None:
        in_flight.append(victim.tokens_in_flight)
        preempt(victim, batch)

    monkeypatch.setattr(harness.parts.scheduler, "_preempt", watched)
    ours, theirs = (
        [each.submit([i, *PROMPT], 40, seed=i, logprobs=1, **GOOD) for i in range(6)]
        for each in (harness, alone)
    )
    while harness.round():
        assert not any(request.kv_len for request in harness.parts.scheduler.waiting)
    alone.run()
    assert sum(number > 0 for number in in_flight) > 1
    assert_same_text(ours, theirs)
    assert [[*map(list, r.logprobs)] for r in ours] == [[*map(list, r.logprobs)] for r in theirs]
    assert all_pages_are_back(harness.executor)


def test_where_a_processor_runs_every_round_is_read_first_and_the_others_are_none_the_worse(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    in_flight: list[tuple[bool, int]] = []

    def record(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        logits[NAN_TOKEN] = -torch.inf
        return logits

    harness = make()
    before_launch(
        harness,
        monkeypatch,
        lambda batch: in_flight.append(
            (edited in batch.requests(), len(harness.executor._in_flight))
        ),
    )
    others = submit_good(harness)
    edited = harness.submit([9, *PROMPT], 10, logits_processor=record, draft_limit=0)
    harness.run()
    assert {number for is_edited, number in in_flight if is_edited} == {0}
    assert {number for is_edited, number in in_flight if not is_edited} == {0, 1}
    assert seen == [edited.tokens[: 8 + i] for i in range(10)]
    assert output_of(edited) == text_alone(make, [9, *PROMPT], 10, logit_bias={NAN_TOKEN: -100.0})
    assert list(map(output_of, others)) == good_texts(make)
