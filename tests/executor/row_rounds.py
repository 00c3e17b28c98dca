"""Rounds whose requests have different numbers of rows, and the rows of their forwards."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from tests.executor.harness import Harness, user_provided
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.rounds.round_reader import LaunchedRound

DRAFT_LEN, PROMPT = 4, [5, 9, 2, 7]


def wrong_drafts(tiny: Path, **options: Any) -> Harness:
    """Rounds of DRAFT_LEN drafts, all of them wrong."""
    return Harness(tiny, **user_provided(lambda request: [1] * DRAFT_LEN, DRAFT_LEN), **options)


def rows_and_batches(harness: Harness) -> list[tuple[int, ScheduledBatch]]:
    """The target's forwards from now on: how many rows each has, and for which batch."""
    runner, seen, launched = harness.parts.runner, list[tuple[int, ScheduledBatch]](), []
    launch, run = runner.launch, runner.engine.run

    def watched_launch(batch: ScheduledBatch) -> LaunchedRound:
        launched.append(batch)
        return launch(batch)

    def watched_run(token_ids: torch.Tensor, *arguments: Any) -> torch.Tensor:
        seen.append((len(token_ids), launched[-1]))
        return run(token_ids, *arguments)

    runner.launch = watched_launch  # type: ignore[method-assign] # the test looks on
    runner.engine.run = watched_run  # type: ignore[method-assign]
    return seen


def may_have_any_rows(harness: Harness) -> bool:
    """Whether a round's requests may have different numbers of rows."""
    runner = harness.parts.runner
    return not (harness.parts.slots.shapes.has_trees or runner.drafter.reads_whole_windows)


def draw_rows(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """From now on each drafting request has any number of rows, another one in each round. Returns
    what was drawn."""
    random, drawn = Random(0), list[tuple[int, ...]]()

    def row_counts(batch: ScheduledBatch) -> list[int] | None:
        window, own = batch.shape.window, batch.__dict__.setdefault("drawn", {})
        if window == 1:
            return None
        for request in batch.generation_requests:
            most = window if request.draft_limit else 1
            own.setdefault(request.request_id, random.randrange(1, most + 1))
        counts = [min(own[r.request_id], window) for r in batch.generation_requests]
        drawn.append(tuple(counts))
        return counts

    monkeypatch.setattr(ScheduledBatch, "row_counts", property(row_counts))
    monkeypatch.setattr(harness.parts.runner, "is_ragged", lambda *_: True)
    return drawn
