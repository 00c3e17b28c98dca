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
        share = found["bytes"] / gathered[way]["bytes"]
        if way in ("greedy", "sampled"):
            # 16 bytes of two ranks for each row, which has 1,024 logits in float32 or more.
            assert 0 < share <= 16 / 4096, (way, found["bytes"], gathered[way]["bytes"])
        elif way == "filtered":  # drafts are filtered, too
            assert share == 1
        else:  # drafts are exchanged
            assert 0.05 < share < 1, way
    assert exchanged["greedy"]["tokens"] != exchanged["sampled"]["tokens"]
