"""Requests have different numbers of rows in a round: the forward has just these rows, and no text
depends on how many they are."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.guided_rounds import submit_guided
from tests.executor.harness import Harness, output_of
from tests.executor.row_rounds import DRAFT_LEN, PROMPT, draw_rows, rows_and_batches, wrong_drafts
from tests.lossless.engines import tiny_engine
from tests.models.mtp_reference import save_predictable
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor import build
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.outputs import Logprob

CHAINS = ("ngram", "sa", "draft_target", "draft_target_one_model", "eagle3", "eagle3_two_model")
# Pages for a few requests only, which share their prompts' pages.
SMALL_POOL = {
    "kv_cache_config": {"tokens_per_block": 4, "max_tokens": 120},
    "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("mode", ["user_provided", *CHAINS])
def test_a_request_without_drafts_has_one_row_next_to_drafting_ones(
    tiny: Path, drafts: tuple[Path, Path], mode: str
) -> None:
    own = mode == "user_provided"
    harness = wrong_drafts(tiny) if own else Harness(tiny, **tiny_engine(mode, drafts, DRAFT_LEN))
    seen = rows_and_batches(harness)
    limits = [DRAFT_LEN, 0, 0, DRAFT_LEN, 0]
    requests = [harness.submit([i + 1, *PROMPT], 30, draft_limit=n) for i, n in enumerate(limits)]
    harness.rounds(3)
    late = harness.submit(PROMPT, 10, draft_limit=0)
    harness.run()
    assert not any(request.error for request in (*requests, late))
    mixed = 0
    for num_rows, batch in seen:
        window = batch.shape.window
        counts = [window if r.draft_limit else 1 for r in batch.generation_requests]
        if not batch.context_requests:
            assert num_rows == sum(counts)
            mixed += len(set(counts)) > 1
    assert mixed > 3
    [joining] = [(n, batch) for n, batch in seen if late in batch.context_requests]
    assert joining[0] == len(PROMPT) + joining[1].num_window_rows


def submit_all(harness: Harness) -> list[LlmRequest]:
    """Requests of each way of sampling, some with grammars, log probabilities or edits on the
    host, and with a common beginning."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 8, "logprobs": 2},
        {"presence_penalty": 0.6, "repetition_penalty": 1.3},
        {"temperature": 0.8, "frequency_penalty": 0.4, "logit_bias": {7: 2.0}, "logprobs": 0},
        {"stop_token_ids": [3, 8], "min_tokens": 12},
        {"bad_token_ids": [[i, j] for i in range(8) for j in range(8)]},
    ]
    plain = {"draft_limit": 0}
    requests = [
        harness.submit([*PROMPT, *PROMPT, i], 24, seed=i, **way, **(plain if i == 4 else {}))
        for i, way in enumerate(ways)
    ]
    return requests + submit_guided(harness, 4)


def values_of(logprobs: list[dict[int, Logprob]]) -> list[float]:
    return [each.logprob for entry in logprobs for each in entry.values()]


@pytest.mark.thinned(8)
@pytest.mark.parametrize("options", [{}, SMALL_POOL], ids=["", "preemptions"])
@pytest.mark.parametrize("mode", CHAINS)
def test_any_number_of_rows_gives_the_text_of_plain_decoding(
    tiny: Path,
    drafts: tuple[Path, Path],
    mode: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = Harness(tiny, disable_overlap_scheduler=True)
    expected = submit_all(plain)
    plain.run()
    harness = Harness(tiny, **tiny_engine(mode, drafts, DRAFT_LEN), **options)
    drawn = draw_rows(harness, monkeypatch)
    requests = submit_all(harness)
    harness.run()
    assert list(map(output_of, requests)) == list(map(output_of, expected))
    for request, alone in zip(requests, expected, strict=True):
        assert values_of(request.logprobs) == pytest.approx(values_of(alone.logprobs), abs=1e-3)
    assert {1, DRAFT_LEN, DRAFT_LEN + 1} <= {count for counts in drawn for count in counts}
    accepted = sum(request.counters.stats().num_accepted_tokens for request in requests)
    assert accepted > 0
    preempted = harness.parts.scheduler.num_preemptions > 0
    assert preempted == bool(options)


@pytest.mark.thinned
@pytest.mark.parametrize("attn_backend", ["VANILLA", "TRITON"])
@pytest.mark.parametrize("latents", [False, True], ids=["heads", "latents"])
def test_every_attention_serves_any_number_of_rows(
    tiny: Path,
    drafts: tuple[Path, Path],
    tmp_path: Path,
    latents: bool,
    attn_backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, drafting = tiny, tiny_engine("eagle3", drafts, DRAFT_LEN)
    if latents:
        save_predictable(tmp_path)
        target = tmp_path
        drafting = {"speculative_config": {"decoding_type": "MTP", "max_draft_len": DRAFT_LEN}}
    texts = []
    for own in ({}, drafting):
        harness = Harness(target, max_seq_len=64, attn_backend=attn_backend, **own)
        drawn = draw_rows(harness, monkeypatch) if own else []
        requests = [
            harness.submit([*PROMPT, i], 30, seed=i, temperature=0.3 * (i % 2), draft_limit=n)
            for i, n in enumerate((4, 0, 4, 2) if own else (0, 0, 0, 0))
        ]
        harness.run()
        texts.append(list(map(output_of, requests)))
    assert texts[0] == texts[1]
    assert len(set(drawn)) > 10


# The requests of a round share its rows, and the device gives them to the drafts that are
# likeliest to be accepted: the forward has just these rows, and no text depends on their number.


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


@pytest.mark.thinned(8)
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
    tiny: Path, drafts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "time_rounds", lambda *_: TIMES)
    options = tiny_engine("eagle3", drafts, 7, enable_adaptive_verification=True)
    texts, seen = [], list[tuple[int, ScheduledBatch]]()
    for own in ({}, options):
        harness = Harness(tiny, max_batch_size=24, **own)
        seen = rows_and_batches(harness)
        requests = [
            harness.submit([*PROMPT, i], 8 + 2 * i, seed=i, temperature=0.9 * (i % 2))
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
