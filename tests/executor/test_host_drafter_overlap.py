"""A drafter that needs tokens on the host: the host schedules the next round while the device runs,
then reads, drafts and launches. Nothing of it changes a text."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.draft_caches import SMALL_POOL, submit_traffic
from tests.executor.harness import Harness, ScriptedDrafter, all_pages_are_back, output_of
from tests.executor.hooks import before_launch, rounds_in_flight
from tests.executor.overlap_rounds import NO_OVERLAP, assert_same_text
from tests.executor.test_broken_rounds import Breaking
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.interface import ResourceManager

PROMPT = [3, 14, 15, 9, 26, 5, 35]


def user_provided(**options: Any) -> dict[str, Any]:
    drafter = ScriptedDrafter(lambda request: [1, 2, 3][: request.num_drafts_wanted])
    config = {"decoding_type": "User_Provided", "drafter": drafter, "max_draft_len": 3}
    return {"speculative_config": config | options}


class Watched(Harness):
    """Notes how many rounds are in flight when one is scheduled, drafted for and launched."""

    def __init__(self, model: Path, **options: Any) -> None:
        super().__init__(model, **options)
        self.scheduled: list[int] = []
        self.drafted: list[int] = []
        self.launched: list[int] = []
        self.num_dropped = 0
        scheduler, drafter = self.parts.scheduler, self.parts.drafter
        schedule, prepare = scheduler.schedule, drafter.prepare_draft_tokens

        def watched_schedule(
            generating: list[LlmRequest], shape: DraftShape, **options: bool
        ) -> Any:
            self.scheduled.append(self._in_flight)
            self._generating = len(generating)
            return schedule(generating, shape, **options)

        def watched_prepare(batch: ScheduledBatch) -> None:
            if batch.shape.depth:
                self.drafted.append(self._in_flight)
            prepare(batch)

        def look(batch: ScheduledBatch) -> None:
            self.launched.append(self._in_flight)
            self.num_dropped += self._generating - len(batch.generation_requests)

        scheduler.schedule = watched_schedule  # type: ignore[method-assign] # the harness looks on
        drafter.prepare_draft_tokens = watched_prepare  # type: ignore[method-assign] # the same
        before_launch(self.executor, look)

    @property
    def _in_flight(self) -> int:
        return len(rounds_in_flight(self.executor))


def test_the_next_round_is_scheduled_in_time_and_drafted_for_when_all_tokens_are_read(
    tiny: Path,
) -> None:
    harness = Watched(tiny, **user_provided())
    for place in range(3):
        harness.submit([place, *PROMPT], max_tokens=60)
    for draft_len in [3, 3, 3, 0, 0, 0, 3, 0, 3, 0, 0]:
        harness.parts.tier_for = lambda *_, draft_len=draft_len: draft_len
        harness.round()
    assert harness.scheduled == [0] + [1] * 10
    assert harness.drafted == [0] * 4, "the first round had contexts only"
    assert not any(harness.launched)
    harness.run()
    assert all_pages_are_back(harness.executor)


def test_disabling_overlap_reads_every_round_before_the_next_is_scheduled(tiny: Path) -> None:
    harness = Watched(tiny, **user_provided(), **NO_OVERLAP)
    harness.parts.tier_for = lambda *_: 3 * (len(harness.scheduled) % 2)
    harness.submit(PROMPT, max_tokens=20)
    harness.run()
    assert not any(harness.scheduled) and len(harness.scheduled) > 10


SITUATIONS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "chunked_prefill": {"max_num_tokens": 24, "enable_chunked_prefill": True},
    "preemption": SMALL_POOL,
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_texts_are_those_of_rounds_that_are_read_at_once(situation: str, tiny: Path) -> None:
    """Requests end at stop tokens, also while their next round is scheduled."""
    options = user_provided() | SITUATIONS[situation]
    harness, alone = Watched(tiny, **options), Harness(tiny, **options, **NO_OVERLAP)
    ours, theirs = (submit_traffic(each, Random(3), 24) for each in (harness, alone))
    while harness.round():
        harness.executor.check_integrity()
    alone.run()
    assert_same_text(ours, theirs)
    assert sum(harness.scheduled) > 20 and not any(harness.drafted) and harness.num_dropped > 1
    assert bool(harness.parts.scheduler.num_preemptions) == (situation == "preemption")
    if situation == "undisturbed":
        ours, theirs = ([r.counters.rounds_by_outcome for r in each] for each in (ours, theirs))
        assert ours == theirs
    assert all_pages_are_back(harness.executor)


def test_draft_lengths_with_zero_among_them_change_no_text(tiny: Path) -> None:
    """Scheduled with one length, read with another, in every order."""
    harness, alone = Watched(tiny, **user_provided()), Harness(tiny, **NO_OVERLAP)
    lengths = Random(4)
    harness.parts.tier_for = lambda *_: lengths.choice((0, 0, 1, 3))
    ours, theirs = (submit_traffic(each, Random(5), 24) for each in (harness, alone))
    while harness.round():
        harness.executor.check_integrity()
    alone.run()
    assert_same_text(ours, theirs)
    assert not any(harness.launched) and not any(harness.drafted)


def test_a_request_cancelled_before_its_round_is_read_is_in_no_round_any_more(tiny: Path) -> None:
    harness = Watched(tiny, **user_provided(), max_batch_size=2)
    victim, other = (harness.submit([place, *PROMPT], max_tokens=40) for place in range(2))
    waiting = harness.submit([2, *PROMPT], max_tokens=9)
    for _ in range(4):
        harness.round()
    assert victim.tokens_in_flight and waiting.state is RequestState.WAITING
    harness.queue.cancel(victim.request_id)
    harness.round()
    num_tokens = victim.num_tokens
    assert victim.finish_reason == "cancelled" and waiting.slot >= 0
    harness.run()
    assert victim.num_tokens == num_tokens
    alone = Harness(tiny, **NO_OVERLAP)
    texts = [alone.submit([place, *PROMPT], number) for place, number in ((1, 40), (2, 9))]
    alone.run()
    assert list(map(output_of, (other, waiting))) == list(map(output_of, texts))
    assert all_pages_are_back(harness.executor)


def test_when_reading_breaks_off_a_request_that_joins_the_scheduled_round_runs_on(
    tiny: Path,
) -> None:
    breaking = Breaking()
    harness = Watched(tiny, **user_provided(resource_manager=breaking))
    failing = harness.submit(PROMPT, max_tokens=40)
    for _ in range(3):
        harness.round()
    joining = harness.submit([9, *PROMPT], max_tokens=12, presence_penalty=0.5, temperature=0.9)
    breaking.is_due = True
    harness.round()
    assert failing.error == "BufferError: the disk went"
    assert joining.slot >= 0 and not joining.num_output_tokens
    harness.run()
    alone = Harness(tiny, **NO_OVERLAP)
    text = alone.submit([9, *PROMPT], 12, seed=joining.seed, presence_penalty=0.5, temperature=0.9)
    alone.run()
    assert output_of(joining) == output_of(text)
    assert all_pages_are_back(harness.executor)


def test_a_users_manager_sees_a_round_end_before_the_next_one_begins(tiny: Path) -> None:
    events: list[str] = []

    class Listening(ResourceManager):
        def prepare_resources(self, batch: ScheduledBatch) -> None:
            events.append("prepare")

        def update_resources(self, batch: ScheduledBatch) -> None:
            events.append("update")

    harness = Watched(tiny, **user_provided(resource_manager=Listening()))
    harness.parts.tier_for = lambda *_: 3 * (len(harness.scheduled) % 3 > 0)
    harness.submit(PROMPT, max_tokens=30)
    harness.run()
    assert sum(harness.scheduled) > 10
    assert events == ["prepare", "update"] * (len(events) // 2)
