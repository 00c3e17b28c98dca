"""Draft weights are swapped on all ranks, or on none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed.swapping_world import HEAD, make_llm, outputs
from tests.distributed.worlds import run_world
from tests.executor.test_draft_weights import copy_of

pytest.importorskip("mpi4py")


@pytest.mark.slow
def test_two_ranks_swap_together_and_change_no_text(tmp_path: Path) -> None:
    other = copy_of(HEAD, tmp_path / "other", 0.7)
    narrow = copy_of(HEAD, tmp_path / "narrow", 1.0)
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    module = ["-m", "tests.distributed.swapping_world", str(other), str(narrow)]
    world = run_world(2, module)
    assert world.returncode == 0, world.output
    assert "refused the weights do not fit" in world.output
    assert "texts True version 1" in world.output
    (line,) = [each for each in world.output.splitlines() if each.startswith("counts ")]
    before, after = json.loads(line.removeprefix("counts "))
    assert before != after
    for head, counts in ((HEAD, before), (str(other), after)):
        with make_llm(head, 1) as llm:
            assert json.loads(json.dumps(outputs(llm)[1])) == counts
