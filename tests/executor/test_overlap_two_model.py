"""Overlap on the two-model path. A drafter on the host begins when all rounds were read, and its
rounds of draft length 0 overlap. A draft model drafts before the round before is read, with the
same drafts."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.draft_caches import HOT
from tests.executor.harness import (
    Harness,
    all_pages_are_back,
    draft_target,
    output_of,
    user_provided,
)
from tests.executor.hooks import rounds_in_flight
from tests.executor.tiny_llama import write_tiny_llama
from tllm_spec.executor.batch import ScheduledBatch

PROMPT = [3, 14, 15, 9, 26, 5, 35]


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("draft"))


def run_lengths(harness: Harness, lengths: list[int]) -> tuple[list[int], list[int]]:
    """Rounds with these draft lengths. How many rounds are in flight when drafts are made, and
    after each round."""
    for place in range(3):
        harness.submit([place, *PROMPT], max_tokens=40)
    executor, drafter = harness.executor, harness.parts.drafter
    prepare, in_flight, left = drafter.prepare_draft_tokens, list[int](), list[int]()

    def watched(batch: ScheduledBatch) -> None:
        if batch.shape.depth:
            in_flight.append(len(rounds_in_flight(executor)))
        prepare(batch)

    drafter.prepare_draft_tokens = watched  # type: ignore[method-assign] # a spy on this one object
    for draft_len in lengths:
        harness.parts.tier_for = lambda *_, draft_len=draft_len: draft_len
        harness.round()
        left.append(len(rounds_in_flight(executor)))
    harness.run()
    assert all_pages_are_back(executor)
    return in_flight[: sum(length > 0 for length in lengths) - 1], left


def test_a_drafter_on_the_host_sees_all_tokens(tiny: Path) -> None:
    harness = Harness(tiny, **user_provided(lambda request: [1, 2, 3][: request.num_drafts_wanted]))
    in_flight, left = run_lengths(harness, [3, 3, 0, 0, 0, 3, 0, 3, 0, 0])
    assert in_flight == [0] * 3, "the first round had contexts only"
    assert left == [1] * 10


def test_a_draft_model_drafts_before_the_round_before_is_read(tiny: Path, draft: Path) -> None:
    """Also in the round in which drafting resumes."""
    lengths = [3, 3, 3, 0, 0, 3, 0, 2, 3]
    in_flight, left = run_lengths(Harness(tiny, **draft_target(draft, 3)), lengths)
    assert in_flight == [1] * 5 and left == [1] * len(lengths)


SITUATIONS: dict[str, dict[str, Any]] = {
    "undisturbed": {},
    "chunks": {"enable_chunked_prefill": True, "max_num_tokens": 40},
    "prefixes": {"kv_cache_config": {"tokens_per_block": 4}},
    "limits": {"max_batch_size": 2},
    "rejection_sampling": {},
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("temperature", [None, HOT])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_overlap_changes_neither_drafts_nor_acceptance_of_a_draft_model(
    tiny: Path, draft: Path, situation: str, temperature: float | None
) -> None:
    """Drafted and accepted drafts of every round of every request."""
    rejects = situation == "rejection_sampling"
    options = SITUATIONS[situation] | draft_target(draft, 3, use_rejection_sampling=rejects)
    outcomes, texts = [], []
    for off in (False, True):
        harness, random = Harness(tiny, **options, disable_overlap_scheduler=off), Random(2)
        shared = [random.randrange(64) for _ in range(21)]
        requests = [
            harness.submit(
                [*shared[: random.randrange(21)], i],
                random.randrange(1, 40),
                temperature=temperature,
                draft_limit=random.choice((0, 1, 3, 3, 3)),
            )
            for i in range(12)
        ]
        harness.run()
        texts.append(list(map(output_of, requests)))
        outcomes.append([request.counters.rounds_by_outcome for request in requests])
        assert all_pages_are_back(harness.executor)
    assert texts[0] == texts[1] and outcomes[0] == outcomes[1]
    assert sum(sum(own[1:]) for own in outcomes[0]) > 20


def test_disabling_overlap_also_disables_it_for_rounds_without_drafts(
    tiny: Path, draft: Path
) -> None:
    harness = Harness(tiny, **draft_target(draft, 3), disable_overlap_scheduler=True)
    harness.parts.tier_for = lambda *_: 0
    harness.submit(PROMPT, max_tokens=9)
    while harness.round():
        assert not rounds_in_flight(harness.executor)
