"""Where the rounds in flight may be the last of all requests, by `max_tokens`, the host reads them
before the next launch."""

from pathlib import Path
from typing import Any

import pytest

from tests.executor.harness import Harness, draft_target
from tests.executor.hooks import before_launch, rounds_in_flight
from tllm_spec.executor.batch import ScheduledBatch

PROMPT = [3, 14, 15, 9, 26, 5, 35]


def launches(harness: Harness) -> list[tuple[list[int], int]]:
    """Lists whose the rounds to come are, and how many were in flight at each launch."""
    found: list[tuple[list[int], int]] = []

    def look(batch: ScheduledBatch) -> None:
        ids = [request.request_id for request in batch.requests()]
        found.append((ids, len(rounds_in_flight(harness.executor))))

    before_launch(harness.executor, look)
    return found


def always_right(tiny: Path, **options: Any) -> Harness:
    """The target drafts for itself: 4 tokens a round."""
    return Harness(tiny, **draft_target(tiny, 3, draft_target_one_model=True), **options)


@pytest.mark.parametrize("max_tokens", range(6, 14))
def test_no_round_is_launched_after_the_last_request_has_ended(tiny: Path, max_tokens: int) -> None:
    harness = always_right(tiny)
    found = launches(harness)
    request = harness.submit(PROMPT, max_tokens)
    harness.run()
    num_rounds = 1 + -(-(max_tokens - 1) // 4)  # the context's, and one for each 4 tokens more
    assert [ids for ids, _ in found] == [[request.request_id]] * num_rounds
    assert request.num_output_tokens == max_tokens
    # Only what may be the end is waited for: the last 4 tokens, be they one round's or those of
    # two.
    assert [in_flight for _, in_flight in found[:-2]] == [0, *[1] * (num_rounds - 3)]


def test_a_request_that_may_end_is_not_waited_for_while_another_continues(tiny: Path) -> None:
    harness = always_right(tiny)
    found = launches(harness)
    short, long = harness.submit(PROMPT, 13), harness.submit([1, *PROMPT], 41)
    harness.run()
    of_short = [in_flight for ids, in_flight in found if short.request_id in ids]
    assert of_short == [0, 1, 1, 1, 1], "the last was one too many"
    of_long = [in_flight for ids, in_flight in found if long.request_id in ids]
    assert len(of_long) == 11 and of_long[1:-2] == [1] * 8


def test_a_waiting_request_gets_the_slot_of_one_that_may_end_without_an_extra_round(
    tiny: Path,
) -> None:
    harness = always_right(tiny, max_batch_size=1)
    found = launches(harness)
    first, second = harness.submit(PROMPT, 13), harness.submit([1, *PROMPT], 5)
    harness.run()
    assert [ids for ids, _ in found] == [[first.request_id]] * 4 + [[second.request_id]] * 2


def test_a_request_that_may_end_is_not_waited_for_where_another_can_join(tiny: Path) -> None:
    harness = always_right(tiny)
    found = launches(harness)
    first = harness.submit(PROMPT, 13)
    while not first.may_have_ended:
        harness.round()
    second = harness.submit([1, *PROMPT], 5)
    harness.run()
    assert len(found) == 6 and found[4] == ([second.request_id, first.request_id], 1)
