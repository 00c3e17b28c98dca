"""A round that raises: which requests it fails, and that nothing else of it remains."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness, draft_target, output_of, user_provided
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.sampling.row_group import TokenCounts

PROMPT, OTHERS, LENGTH = [1, 2, 3, 4, 5], [[6, 7, 8], [9, 10, 11, 12]], 24


def run(harness: Harness, **params: Any) -> list[LlmRequest]:
    """Runs `PROMPT` with these parameters next to plain requests."""
    requests = [
        harness.submit(PROMPT, LENGTH, **params),
        *(harness.submit(each, LENGTH) for each in OTHERS),
    ]
    harness.run()
    return requests


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[list[int]]:
    return list(map(output_of, run(Harness(tiny))))


@pytest.mark.covering
@pytest.mark.parametrize("position", [None, 5])
@pytest.mark.parametrize("mode", ["one_model", "draft_target", "user_provided"])
def test_a_processor_that_raises_after_wrong_drafts_fails_only_where_plain_decoding_does(
    tiny: Path, tiny_draft: Path, expected: list[list[int]], mode: str, position: int | None
) -> None:
    """A grammar may raise for a text that it would never have allowed."""
    options = {
        "one_model": draft_target(tiny_draft, draft_target_one_model=True),
        "draft_target": draft_target(tiny_draft),
        "user_provided": user_provided(lambda request: [7, 7]),
    }[mode]
    wrong_texts = []

    def follow(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        output = tokens[len(PROMPT) :]
        if output != expected[0][: len(output)]:
            wrong_texts.append(output)
            raise LookupError("not of this language")
        if len(output) == position:
            raise LookupError("not this far")
        return logits

    requests = run(Harness(tiny, **options), logits_processor=follow)
    assert wrong_texts
    assert requests[0].error == (None if position is None else "LookupError: not this far")
    assert list(map(output_of, requests)) == [expected[0][:position], *expected[1:]]


def test_drafts_of_a_round_that_broke_off_are_not_accepted_later(tiny: Path) -> None:
    """The pausing request gets no drafts in the next round. Its processor has not seen the drafts
    that its slot still has."""
    fuse = {"lit": False}

    def push(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[sum(tokens[-3:]) % 64] += 9.0 * (len(tokens) > 8)
        return logits

    def raise_if_lit(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
        if fuse["lit"]:
            raise LookupError("lit")
        return logits

    plain, harness = Harness(tiny), Harness(tiny, **draft_target(tiny))
    undisturbed = plain.submit(PROMPT, LENGTH, logits_processor=push)
    plain.run()
    request, _ = (
        harness.submit(PROMPT, LENGTH, logits_processor=push),
        harness.submit(OTHERS[0], LENGTH),
    )
    culprit = harness.submit(OTHERS[1], LENGTH, logits_processor=raise_if_lit)
    harness.run_until(request, RequestState.GENERATION)
    fuse["lit"] = True
    harness.round()
    assert culprit.error == "LookupError: lit" and request.num_output_tokens == 1
    request.draft_pause.rounds_left = 1
    harness.run()
    assert output_of(request) == output_of(undisturbed)


def test_an_error_while_requests_join_fails_their_round_and_not_the_executor(
    tiny: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(counts: TokenCounts, request: LlmRequest) -> None:
        raise torch.OutOfMemoryError("no room for counts")

    monkeypatch.setattr(TokenCounts, "start", start)
    harness = Harness(tiny)
    penalised = harness.submit(PROMPT, LENGTH, presence_penalty=1.0)
    harness.run()
    assert penalised.error == "OutOfMemoryError: no room for counts"
    assert list(map(output_of, run(harness))) == expected


class Raising:
    """The checker of a request's stop strings, whose tokenizer fails after so many tokens."""

    def __init__(self, error: BaseException, num_tokens: int) -> None:
        self.error, self.num_tokens = error, num_tokens

    def feed(self, token: int) -> None:
        self.num_tokens -= 1
        if self.num_tokens <= 0:
            raise self.error


class Unforeseen(Exception):
    """An exception of no kind that Python's library raises."""


@pytest.mark.covering
@pytest.mark.parametrize(
    "error", [IndexError, StopIteration, OSError, MemoryError, BufferError, Unforeseen, SystemExit]
)
@pytest.mark.parametrize("mode", ["plain", "user_provided"])
def test_whatever_a_users_tokenizer_raises_fails_only_the_requests_that_use_it(
    tiny: Path, expected: list[list[int]], mode: str, error: type[BaseException]
) -> None:
    harness = Harness(
        tiny, **(user_provided(lambda request: [7, 7]) if mode == "user_provided" else {})
    )
    requests = [harness.submit(each, LENGTH) for each in (PROMPT, *OTHERS)]
    failing = [harness.submit([20 + position], LENGTH) for position in range(3)]
    for position, request in enumerate(failing):  # in consecutive rounds
        request.stop_checker = Raising(error("no such piece"), 3 + position)
    harness.run()
    assert [request.error for request in failing] == [f"{error.__name__}: no such piece"] * 3
    assert list(map(output_of, requests)) == expected


class Breaking(ResourceManager):
    """A user's manager that fails once, after a round has been read."""

    is_due = False

    def update_resources(self, batch: ScheduledBatch) -> None:
        if self.is_due:
            self.is_due = False
            raise BufferError("the disk went")


def test_a_request_preempted_before_the_reading_of_its_round_breaks_off_runs_on(tiny: Path) -> None:
    """With overlap, the launch of the next round may have preempted it. A request that had ended
    in the round that broke off stays ended."""
    pool = {"tokens_per_block": 4, "max_tokens": 120}
    policy = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
    harness = Harness(tiny, max_seq_len=64, kv_cache_config=pool, scheduler_config=policy)
    breaking = Breaking()
    harness.executor.resources.append(breaking)
    ending, failing = harness.submit([1, 2], 30), harness.submit([1, 2, 3], 30)
    others = [harness.submit([4 + position, 5, 6], 30) for position in range(5)]
    schedule, preempted = harness.parts.scheduler.schedule, []

    def watched(generating: list[LlmRequest], shape: DraftShape, **options: bool) -> Any:
        scheduled = schedule(generating, shape, **options)
        found = [
            each for each in others if each.tokens_in_flight and each.state is RequestState.WAITING
        ]
        if found and not preempted:
            preempted.extend(found)
            breaking.is_due = True
            ending.max_tokens = ending.num_output_tokens + 1
        return scheduled

    harness.parts.scheduler.schedule = watched  # type: ignore[method-assign]
    harness.run()
    assert preempted and failing.error == "BufferError: the disk went"
    assert [request.finish_reason for request in preempted] == ["length"] * len(preempted)
    assert all(request.is_finished for request in others)
    assert ending.finish_reason == "length" and ending.num_output_tokens == ending.max_tokens < 30
