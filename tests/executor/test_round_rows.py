"""A request without drafts has one row in a round next to drafting requests: what the scheduler
counts, the pages that it takes, and where all requests have whole windows."""

from pathlib import Path

import pytest

from tests.executor.graph_rounds import with_graphs
from tests.executor.harness import user_provided
from tests.executor.row_rounds import DRAFT_LEN, PROMPT, rows_and_batches, wrong_drafts
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import RequestState


def test_the_budget_of_a_round_counts_the_rows_that_run(tiny: Path) -> None:
    harness = wrong_drafts(
        tiny, max_num_tokens=24, enable_chunked_prefill=True, disable_overlap_scheduler=True
    )
    running = [harness.submit(PROMPT[i:], 40, draft_limit=4 * (i == 0)) for i in range(3)]
    for request in running:
        harness.run_until(request, RequestState.GENERATION)
    late = harness.submit(list(range(40)), 4)
    harness.round()
    assert late.kv_len == 24 - (5 + 1 + 1)
    harness.run()


def test_pages_are_taken_for_the_row_of_a_request_without_drafts(tiny: Path) -> None:
    harness = wrong_drafts(
        tiny, kv_cache_config={"tokens_per_block": 1}, disable_overlap_scheduler=True
    )
    wanting, plain = harness.submit(PROMPT, 20), harness.submit(PROMPT[1:], 20, draft_limit=0)
    seen: list[tuple[int, int]] = []
    prepare = harness.parts.kv.prepare_resources

    def watched(batch: ScheduledBatch) -> None:
        if len(batch.generation_requests) == 2:
            both = wanting, plain
            seen.append(tuple(harness.parts.kv.held(r)[0] - r.num_tokens for r in both))
        prepare(batch)

    harness.parts.kv.prepare_resources = watched  # type: ignore[method-assign]
    harness.run()
    assert len(seen) > 10 and set(seen) == {(DRAFT_LEN, 0)}


@pytest.mark.usefixtures("eager_graphs")
def test_in_a_round_that_a_graph_holds_all_requests_have_whole_windows(tiny: Path) -> None:
    """One launch of more rows takes less time than a round kernel by kernel. Chunks that join do
    not change the windows."""
    options = user_provided(lambda request: [1] * DRAFT_LEN, DRAFT_LEN)
    harness = with_graphs(tiny, (1, 2), {0, DRAFT_LEN}, **options)
    seen = rows_and_batches(harness)
    for limit in (DRAFT_LEN, 0):
        harness.run_until(
            harness.submit([limit, *PROMPT], 90, draft_limit=limit), RequestState.GENERATION
        )
    seen.clear()
    harness.round()
    late = harness.submit(PROMPT, 90)
    harness.run_until(late, RequestState.GENERATION)
    harness.round()
    assert [num_rows for num_rows, _ in seen] == [5 + 5, 5 + 5 + len(PROMPT), 5 + 1 + 5]
    harness.run()
