"""Overlap: the next round is launched before the host has read the one before, and the text is the
same."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import (
    HOT,
    SMALL_POOL,
    TOLERANCE,
    draft_entries,
    pools_of,
    slow_drafters,
    spoil_free_pages,
    submit_traffic,
)
from tests.executor.harness import all_pages_are_back, output_of
from tests.executor.hooks import before_launch, before_preemptions, rounds_in_flight
from tests.executor.overlap_rounds import (
    GOOD,
    MODES,
    NAN_TOKEN,
    NO_OVERLAP,
    PROMPT,
    Make,
    assert_same_text,
    good_texts,
    make_of,
    num_rounds_with,
    submit_good,
    text_alone,
)
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost
from tllm_spec.executor.engine.rows import RowBuilder
from tllm_spec.executor.request import LlmRequest, RequestState, Response
from tllm_spec.executor.rounds.round_reader import LaunchedRound


@pytest.fixture(scope="module", params=MODES)
def make(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Make:
    return make_of(tmp_path_factory.mktemp("drafts"), tiny, request.param)


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


@pytest.mark.thinned(5)
@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rounds_in_flight_write_only_to_private_pages_that_their_requests_hold(
    make: Make, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
) -> None:
    options = SMALL_POOL | {"scheduler_config": {"capacity_scheduler_policy": policy}}
    harness = make(**options)
    kv, slots = harness.parts.kv, harness.parts.slots
    written: list[torch.Tensor] = []
    build, launch = RowBuilder.build, harness.parts.runner.launch

    def watched_build(rows: RowBuilder, *arguments: Any) -> Any:
        metadata, token_ids = build(rows, *arguments)
        if rows is harness.parts.runner.engine.rows:  # a draft model may have its own
            written.append(metadata.kv_slots // 4)
        return metadata, token_ids

    def watched_launch(batch: ScheduledBatch) -> LaunchedRound:
        for request in batch.requests():
            pages, end = kv.cache.pages(request.request_id), request.kv_len + request.context_chunk
            assert kv.groups[0].table.device_rows[request.slot, : len(pages)].tolist() == pages
            if request in batch.generation_requests:
                assert request.kv_len <= slots.kv_lens[request.slot] < request.num_tokens_bound
                end = int(slots.kv_lens[request.slot]) + batch.shape.window
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


@pytest.mark.thinned(2)
def test_a_request_that_is_known_to_finish_by_its_length_is_not_launched_again(make: Make) -> None:
    harness = make()
    num_launches: dict[int, int] = {}

    def look(batch: ScheduledBatch) -> None:
        for request in batch.requests():
            assert (
                request.num_output_tokens + num_rounds_with(harness, request) < request.max_tokens
            )
            num_launches[request.request_id] = num_launches.get(request.request_id, 0) + 1

    before_launch(harness.executor, look)
    speculating = [
        harness.submit([i, *PROMPT], max_tokens=i + 1, temperature=HOT) for i in range(20)
    ]
    plain = [harness.submit([i, *PROMPT], max_tokens=i + 1, draft_limit=0) for i in range(12)]
    harness.run()
    assert not [request.error for request in speculating + plain if request.error]
    assert [num_launches[request.request_id] for request in plain] == list(range(1, 13))
    assert [request.num_output_tokens for request in speculating] == list(range(1, 21))


@pytest.mark.thinned(3)
def test_the_round_after_a_requests_end_changes_neither_reused_pages_nor_cached_prefixes(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = text_alone(make, PROMPT, 30, temperature=HOT, seed=4)
    stop = next(i for i in range(8, 30) if text[i] not in text[:i])
    harness = make(max_batch_size=1, kv_cache_config={"tokens_per_block": 4, "max_tokens": 96})
    first = harness.submit(PROMPT, 30, temperature=HOT, seed=4, stop_token_ids=[text[stop]])
    second = harness.submit([50, 51], 30, temperature=HOT, seed=5)
    launched: list[LlmRequest] = []
    spoilt: list[int] = []
    before_launch(harness.executor, lambda batch: launched.extend(batch.requests()))
    respond = harness.executor._respond

    def spoil(responses: list[Response]) -> None:
        respond(responses)
        if first.is_finished and not spoilt:
            latest = rounds_in_flight(harness.executor)[-1]
            assert launched[-1] is first and latest.batch.requests() == [first]
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
        (reference,) = slow_drafters(harness, [third])
        own = draft_entries(harness, third, reference.num_entries)
        assert (own - reference.entries()).abs().max() < TOLERANCE
    harness.run()
    assert output_of(third) == text_alone(make, [*first.tokens, 1], 20)


# Overlap where a request fails, is cancelled or is preempted while a round of it is in flight.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, but after one of its tokens there are no numbers."""
    return write_tiny_llama(tmp_path_factory.mktemp("nan"), nan_token=NAN_TOKEN)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("prompt", "params", "output"),
    [([1, NAN_TOKEN, 2], {}, []), ([1, 2, 3], {"logit_bias": {NAN_TOKEN: 1000.0}}, [NAN_TOKEN])],
    ids=["in_its_context", "in_a_later_round"],
)
def test_a_request_with_nan_logits_fails_alone_though_its_next_round_is_in_flight(
    make: Make, model: Path, prompt: list[int], params: dict[str, Any], output: list[int]
) -> None:
    harness = make(model)
    others = submit_good(harness)
    harness.rounds(4)
    bad = harness.submit(prompt, 20, **params)
    late = harness.submit([0, *PROMPT], 24, seed=0, **GOOD)
    launched: list[LlmRequest] = []
    before_launch(harness.executor, lambda batch: launched.extend(batch.requests()))
    while not bad.is_finished:
        harness.round()
    assert launched.count(bad) == 2 + len(output) and rounds_in_flight(harness.executor)
    assert (
        bad.error is not None and "no token can be chosen" in bad.error and output_of(bad) == output
    )
    harness.run()
    expected = good_texts(make)
    assert list(map(output_of, [*others, late])) == [*expected, expected[0]]


@pytest.mark.thinned(5)
@pytest.mark.parametrize("num_rounds", [1, 2, 5])
def test_a_request_may_be_cancelled_while_a_round_of_it_is_in_flight(
    make: Make, num_rounds: int
) -> None:
    harness = make(max_batch_size=4)
    others = submit_good(harness)
    victim = harness.submit([9, *PROMPT], 24)
    waiting = harness.submit([0, *PROMPT], 24, seed=0, **GOOD)
    harness.rounds(num_rounds)
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


@pytest.mark.thinned(2)
def test_a_new_request_whose_processor_raises_does_not_cost_others_the_round_in_flight(
    make: Make,
) -> None:
    in_flight: list[int] = []

    def fail(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        in_flight.append(len(rounds_in_flight(harness.executor)))
        raise KeyError("not today")

    harness = make()
    others = submit_good(harness)
    harness.rounds(5)
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


@pytest.mark.thinned(3)
def test_when_a_launch_fails_requests_that_were_only_in_the_round_in_flight_get_their_tokens(
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
    assert not rounds_in_flight(harness.executor)
    monkeypatch.undo()
    again = harness.submit([9, *PROMPT], 24)
    harness.run()
    assert output_of(again) == expected[1]


@pytest.mark.thinned(6)
def test_a_request_preempted_with_tokens_in_flight_continues_its_text(make: Make) -> None:
    harness, alone = make(**SMALL_POOL), make(**NO_OVERLAP)
    in_flight: list[int] = []
    before_preemptions(harness.executor, lambda victim: in_flight.append(victim.tokens_in_flight))
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


@pytest.mark.thinned(2)
def test_with_a_logits_processor_every_round_is_read_first_and_other_texts_are_the_same(
    make: Make,
) -> None:
    seen: list[list[int]] = []
    in_flight: list[tuple[bool, int]] = []

    def record(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(tokens)
        logits[NAN_TOKEN] = -torch.inf
        return logits

    harness = make()
    before_launch(
        harness.executor,
        lambda batch: in_flight.append(
            (edited in batch.requests(), len(rounds_in_flight(harness.executor)))
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
