"""Ranks exchange their best tokens where sampling needs no more, and all logits elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.worlds import run_world

pytest.importorskip("mpi4py")


def test_the_exchange_of_best_tokens_sends_little_and_changes_no_text(tmp_path: Path) -> None:
    results = tmp_path / "results"
    world = run_world(2, ["-m", "tests.distributed.exchange_world", str(results)])
    assert world.returncode == 0, world.output
    exchanged, gathered = json.loads(results.read_text())
    for way, found in exchanged.items():
        assert found["tokens"] == gathered[way]["tokens"], way
        logits, offers = gathered[way]["row_bytes"], [16]  # two ranks' values and tokens
        assert min(logits) >= 4096  # 1,024 in float32
        if way in ("greedy", "sampled"):
            assert found["row_bytes"] == offers, way
        elif way == "filtered":  # drafts are filtered, too
            assert found["row_bytes"] == logits
        else:  # drafts are exchanged
            assert set(offers) < set(found["row_bytes"]) <= {*offers, *logits}, way
    assert exchanged["greedy"]["tokens"] != exchanged["sampled"]["tokens"]
