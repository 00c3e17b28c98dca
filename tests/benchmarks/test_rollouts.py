"""What the benchmark of rollouts measures, on a CPU."""

import json
from pathlib import Path

import pytest

from benchmarks.harness.report import main
from benchmarks.rollouts import DEFAULTS, SUBJECTS


@pytest.mark.slow
def test_updates_sleep_and_rollouts_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ["--prompts", "4", "--samples", "2", "--tokens", "24", "--batch-size", "8"]
    rates = ["--stale", "0,0,0", "--followed", "1,1,1"]
    given = ["--device", "cpu", "--output", str(file), *sizes, *rates]
    assert main(SUBJECTS, None, given, **DEFAULTS) == 0
    found = {name: part["rows"] for name, part in json.loads(file.read_text()).items()}
    updates = [row["what"] for row in found["weights"] if row["stopped"] is not None]
    assert updates == ["a copy of them", "an update from the folder"]
    lengths = {row["side"]: row["tokens_per_round"] for row in found["rollout"]}
    assert lengths["plain"] == lengths["stale"] == 1 and lengths["followed"] > 3
