"""`benchmarks.several_devices` measures tiny models on one and two ranks of this machine's CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import several_devices
from benchmarks.harness import report

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.slow


def test_every_job_runs_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    arguments = ["llama-8b", "v3", "--device", "cpu", "--output", str(file)]
    assert report.main(several_devices.SUBJECTS, None, arguments, ranks="1,2", layers=80) == 0
    results = json.loads(file.read_text())
    rounds = [row for row in results["llama-8b"]["rows"] if "batch" in row]
    assert {(row["ranks"], row["batch"]) for row in rounds} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {row["job"] for row in results["v3"]["rows"]} == {"V3-style, tp", "V3-style, ep"}
    assert "| llama-8b, plain | 2 | 1 |" in capsys.readouterr().out
