"""Drafts from the request's own text, looked up on the device in the target's round."""

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.executor.draft_caches import SMALL_POOL, submit_traffic
from tests.executor.graph_rounds import keys_of_build, num_replays, with_graphs
from tests.executor.harness import Harness, all_pages_are_back, output_of
from tests.executor.hooks import before_launch
from tests.kernels.test_suffix_match import drafts_of
from tests.lossless.engines import tiny_engine
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.building.memory import reserved_bytes
from tllm_spec.executor.building.plan import BuildPlan
from tllm_spec.executor.request import LlmRequest, RequestState

NO_OVERLAP = {"disable_overlap_scheduler": True}


def sa(draft_len: int = 3, **options: Any) -> dict[str, Any]:
    own = {"decoding_type": "SA", "max_draft_len": draft_len}
    return {"speculative_config": own | options}


def watch_drafts(harness: Harness, max_match: int = 64) -> dict[tuple[int, int], list[int]]:
    """Checks the drafts of every round that is launched after the one before was read, against the
    text that the host has. Returns them by request id and length of the text."""
    seen: dict[tuple[int, int], list[int]] = {}
    slots = harness.parts.slots

    def look(batch: ScheduledBatch) -> None:
        for request in batch.generation_requests:
            number = min(int(slots.num_drafts[request.slot]), batch.draft_len)
            drafts = slots.window[request.slot, 1 : 1 + number].tolist()
            if not request.tokens_in_flight:
                expected, length = drafts_of(request.tokens, 3, max_match)
                ready = min(request.num_drafts_ready, batch.draft_len, request.draft_limit)
                assert drafts == (expected[:ready] if length else [])
            seen[request.request_id, request.num_tokens] = drafts

    before_launch(harness.executor, look)
    return seen


@pytest.mark.thinned
@pytest.mark.parametrize("max_match", [-1, 1, 2])
@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["undisturbed", "small_pool"])
def test_a_rounds_drafts_follow_the_longest_match_in_the_requests_text(
    tiny: Path, options: dict[str, Any], max_match: int
) -> None:
    """Also after prefix hits, prompts in chunks and preemptions."""
    speculation = sa(max_matching_ngram_size=max_match)
    harness, plain = Harness(tiny, **options, **NO_OVERLAP, **speculation), Harness(tiny)
    seen = watch_drafts(harness, 64 if max_match == -1 else max_match)
    requests, expected = (submit_traffic(each, Random(4), 20) for each in (harness, plain))
    harness.run()
    plain.run()
    assert bool(harness.parts.scheduler.num_preemptions) == bool(options)
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    assert sum(len(drafts) == 3 for drafts in seen.values()) > 15
    assert not all(seen.values())  # there are texts without a match
    assert all_pages_are_back(harness.executor)


def test_the_host_learns_how_many_drafts_a_request_really_had(tiny: Path) -> None:
    """The first prompt has no token twice, the second ends as it begins."""
    harness = Harness(tiny, **sa(), **NO_OVERLAP)
    seen = watch_drafts(harness)
    requests = [harness.submit(prompt, max_tokens=20) for prompt in ([1, 2, 3], [4, 5, 4])]
    harness.run()
    for request in requests:
        numbers = [len(drafts) for key, drafts in seen.items() if key[0] == request.request_id]
        assert request.counters.by_drafted == [numbers.count(number) for number in range(4)]
    assert len({len(drafts) for drafts in seen.values()}) == 2


def run_in_step(harness: Harness) -> list[LlmRequest]:
    requests = submit_traffic(harness, Random(5), 14)
    harness.run()
    return requests


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_rounds_overlap_with_the_same_texts_and_figures(
    tiny: Path, eager_graphs: None, graphs: bool
) -> None:
    options = {"max_batch_size": 8, **sa()}
    harness = with_graphs(tiny, (1, 4, 8), {0, 3}, **options) if graphs else None
    harness, in_turn = harness or Harness(tiny, **options), Harness(tiny, **options, **NO_OVERLAP)
    assert harness.parts.max_in_flight == 1 and harness.parts.drafts_in_flight
    ours, theirs = run_in_step(harness), run_in_step(in_turn)
    assert list(map(output_of, ours)) == list(map(output_of, theirs))
    assert [r.counters.by_accepted for r in ours] == [r.counters.by_accepted for r in theirs]
    assert sum(sum(r.counters.by_accepted) for r in ours) > 20
    assert not graphs or len(num_replays(harness)) > 2


def test_a_changing_draft_length_leaves_the_texts_complete(tiny: Path) -> None:
    """Rounds without drafts add their tokens, too."""
    harness = Harness(tiny, **sa(), **NO_OVERLAP)
    seen, lengths = watch_drafts(harness), [0, 0, 3, 1, 0, 2, 3]
    request = harness.submit([7, 8, 9, 7, 8], max_tokens=40)
    harness.run_until(request, RequestState.GENERATION)
    for number in range(14):
        harness.parts.tier_for = lambda *_, number=number: lengths[number % 7]
        harness.round()
    assert {len(drafts) for drafts in seen.values()} >= {0, 1, 2}


def test_graphs_are_captured_for_the_draft_lengths_that_are_asked_for(tiny: Path) -> None:
    keys = keys_of_build(tiny, **sa())
    assert {key.draft_len for key in keys} == {0, 3}


def test_the_memory_plan_counts_the_texts(tiny: Path, tmp_path: Path) -> None:
    spec = tiny_engine("ngram", (tmp_path, tmp_path), 3)["speculative_config"]
    plans = [
        BuildPlan(LlmArgs.from_kwargs(tiny, max_batch_size=8, cuda_graph_config=None, **options))
        for options in (sa(), {"speculative_config": spec})
    ]
    more = reserved_bytes(plans[0], None, ()) - reserved_bytes(plans[1], None, ())
    assert more == 9 * plans[0].max_len * 4
