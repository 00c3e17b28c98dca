"""The requests of a round share its rows, and the device gives them to the drafts that are
likeliest to be accepted: the forward has just these rows, and no text depends on their number."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness, output_of
from tests.executor.row_rounds import DRAFT_LEN, PROMPT, rows_and_batches
from tests.lossless.engines import tiny_engine
from tests.lossless.test_row_counts import CHAINS, SMALL_POOL, submit_all, values_of
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor import build
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.kernels.slots.round_rows import RoundRows

BUDGET = 2.5
TIMES = MeasuredRoundTimes({20: dict.fromkeys(range(30), 1.0)})


def draw_budgets(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """From now on each round has any number of rows. Returns those that requests were given."""
    random, given = Random(0), list[tuple[int, ...]]()
    choose = SlotState.choose_rows

    def num_window_rows(batch: ScheduledBatch) -> int:
        number, window = len(batch.generation_requests), batch.shape.window
        if not batch.shape.is_ragged:
            return number * window
        drawn = batch.__dict__.setdefault("drawn", random.random())
        return number + round(drawn * number * (window - 1))

    def watched(
        slots: SlotState, slot_ids: torch.Tensor, shape: DraftShape, num_rows: int
    ) -> RoundRows:
        rows = choose(slots, slot_ids, shape, num_rows)
        assert rows.offsets is not None
        assert rows.offsets[-1] == num_rows
        given.append(tuple(rows.offsets.diff().tolist()))
        return rows

    monkeypatch.setattr(ScheduledBatch, "num_window_rows", property(num_window_rows))
    monkeypatch.setattr(SlotState, "choose_rows", watched)
    return given


@pytest.mark.thinned
@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["", "preemptions"])
@pytest.mark.parametrize("mode", CHAINS)
def test_any_number_of_rows_of_the_batch_gives_the_text_of_plain_decoding(
    tiny: Path,
    drafts: tuple[Path, Path],
    mode: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafting = tiny_engine(mode, drafts, DRAFT_LEN, verify_budget=BUDGET)
    harness = Harness(tiny, **drafting, **options)
    compare(tiny, harness, monkeypatch)
    assert (harness.parts.scheduler.num_preemptions > 0) == bool(options)


def compare(
    tiny: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[int, ScheduledBatch]]:
    """With plain decoding, over rounds of any number of rows, which it returns."""
    plain = Harness(tiny, disable_overlap_scheduler=True)
    expected = submit_all(plain)
    plain.run()
    given = draw_budgets(monkeypatch)
    seen = rows_and_batches(harness)
    requests = submit_all(harness)
    harness.run()
    assert not any(request.error for request in requests), [r.error for r in requests]
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    for request, alone in zip(requests, expected, strict=True):
        assert values_of(request.logprobs) == pytest.approx(values_of(alone.logprobs), abs=1e-3)
    of_windows = [(rows, batch) for rows, batch in seen if not batch.context_requests]
    assert all(rows == batch.num_window_rows for rows, batch in of_windows if batch.shape.depth)
    assert {1, DRAFT_LEN, DRAFT_LEN + 1} <= {count for counts in given for count in counts}
    assert any(len(set(counts)) > 1 for counts in given)
    assert sum(request.counters.stats().num_accepted_tokens for request in requests) > 0
    return seen


def test_rounds_with_budgets_of_their_own_give_the_text_of_plain_decoding(
    tiny: Path,
    drafts: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(build, "time_rounds", lambda *_: TIMES)
    options = tiny_engine("eagle3", drafts, 7, enable_adaptive_verification=True)
    texts, seen = [], list[tuple[int, ScheduledBatch]]()
    for own in ({}, options):
        harness = Harness(tiny, max_batch_size=24, **own)
        seen = rows_and_batches(harness)
        requests = [
            harness.submit([*PROMPT, i], 12 + 3 * i, seed=i, temperature=0.9 * (i % 2))
            for i in range(24)
        ]
        harness.run()
        texts.append(list(map(output_of, requests)))
    assert texts[0] == texts[1]
    names = {batch.shape.name for rows, batch in seen if batch.generation_requests}
    assert any("@" in name for name in names) and len(names) > 1
    assert all(rows == batch.num_window_rows for rows, batch in seen if not batch.context_requests)
    state = harness.executor.state()
    assert state["controller"]["slots"].keys() == {"1", "17"}
    assert sum(state["controller"]["slots"]["17"]["expected"].values()) > 0
    totals = state["totals"]
    speculation = totals["speculation"]
    assert totals["offered_drafts"] > totals["verified_drafts"] > 0
    assert totals["verified_drafts"] >= speculation["num_drafted_tokens"]
