"""Adapters are cut over the ranks as their layers are, and all ranks load the same ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.adapters.draft_adapters import write_draft_adapters
from tests.adapters.folders import linear_shapes, random_pairs, write_adapter
from tests.adapters.tiny_adapters import write_adapters
from tests.distributed.worlds import environment, run_world
from tests.models.helpers import save_checkpoint

pytest.importorskip("mpi4py")
MODULE = ["-m", "tests.distributed.adapter_world"]


def lines_of_both(arguments: list[str], *beginnings: str) -> list[str]:
    """What one process prints, and rank 0 of two."""
    alone = subprocess.run(
        [sys.executable, *MODULE, "1", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
    )
    world = run_world(2, [*MODULE, "2", *arguments])
    assert world.returncode == 0, world.output
    expected, found = (
        [line for line in each.splitlines() if line.startswith(beginnings)]
        for each in (alone.stdout, world.output)
    )
    assert found == expected
    return expected


@pytest.mark.slow
def test_two_ranks_have_the_texts_of_one(tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_checkpoint(model, "Llama")
    adapters = write_adapters(tmp_path / "adapters", model)
    others = write_adapters(tmp_path / "others", model, seed=1)
    [(name, (outputs, inputs)), *_] = linear_shapes(
        load_file(model / "model.safetensors"), "q_proj"
    ).items()
    broken = write_adapter(tmp_path / "broken", random_pairs({name: (outputs, inputs + 8)}))
    folders = [str(each) for each in (model, adapters, others, broken)]
    expected = lines_of_both(folders, "texts", "refused")
    assert expected[0].startswith("refused the adapter does not fit")
    texts = json.loads(expected[-1].partition(" ")[2].partition(" adapters")[0])
    assert len(set(map(tuple, texts))) == 5 and texts[4] == texts[1]
    assert expected[-1].endswith("adapters ['a', 'c']")


@pytest.mark.slow
def test_two_ranks_accept_the_drafts_of_an_adapters_own_head_that_one_accepts(
    tmp_path: Path,
) -> None:
    lines = lines_of_both([str(write_draft_adapters(tmp_path))], "drafts")
    texts, counts = zip(*(line.rsplit(" ", 1) for line in lines), strict=True)
    own, shared, none = (texts[index::3] for index in range(3))
    assert own == shared != none
    assert sum(map(int, counts[::3])) > sum(map(int, counts[1::3]))
