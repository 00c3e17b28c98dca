"""Weights are replaced on all ranks, or on none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.swapping_world import HEAD, make_llm, outputs
from tests.distributed.worlds import run_world
from tests.executor.test_draft_weights import copy_of

pytest.importorskip("mpi4py")


@pytest.mark.slow
def test_two_ranks_swap_together(tmp_path: Path) -> None:
    other = copy_of(HEAD, tmp_path / "other", 0.7)
    narrow = copy_of(HEAD, tmp_path / "narrow", 1.0)
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    target = copy_of("zoo:llama", tmp_path / "target", 0.9)
    broken = copy_of("zoo:llama", tmp_path / "broken", 1.0) / "model.safetensors"
    save_file(load_file(broken) | {"model.norm.weight": torch.ones(3)}, broken)
    folders = map(str, (other, narrow, target, broken.parent))
    module = ["-m", "tests.distributed.swapping_world", *folders]
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
    assert "refused model.norm.weight has the shape [3]" in world.output
    (line,) = [each for each in world.output.splitlines() if each.startswith("updated ")]
    with make_llm(HEAD, 1, str(target)) as llm:
        assert json.loads(line.removeprefix("updated ")) == ["b", outputs(llm)[0]]
