"""Overlap where a request fails, is cancelled or is preempted while a round of it is in flight."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.draft_caches import SMALL_POOL, spoil_free_pages
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
from tllm_spec.executor.request import LlmRequest, RequestState


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny`, but after one of its tokens there are no numbers."""
    return write_tiny_llama(tmp_path_factory.mktemp("nan"), nan_token=NAN_TOKEN)


@pytest.fixture(scope="module", params=MODES)
def make(
    request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory
) -> Make:
    return make_of(tmp_path_factory.mktemp("drafts"), tiny, request.param)


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
    for _ in range(4):
        harness.round()
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
    assert all_pages_are_back(harness.executor)


@pytest.mark.thinned(3)
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


def test_a_new_request_whose_processor_raises_does_not_cost_others_the_round_in_flight(
    make: Make,
) -> None:
    in_flight: list[int] = []

    def fail(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        in_flight.append(len(rounds_in_flight(harness.executor)))
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
    assert not rounds_in_flight(harness.executor) and all_pages_are_back(harness.executor)
    monkeypatch.undo()
    again = harness.submit([9, *PROMPT], 24)
    harness.run()
    assert output_of(again) == expected[1]


@pytest.mark.thinned(3)
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
