"""Several ranks emit the tokens of one. A world of ranks is started once for many cases, since each
of its processes imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import CASES, GRID
from tests.distributed.worlds import run_world
from tests.models.helpers import VOCAB_SIZE, save_checkpoint
from tests.models.tiny_eagle import write_tiny_eagle

pytest.importorskip("mpi4py")

EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [0],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("experts")
    save_checkpoint(path, "Qwen2Moe", **EXPERTS)
    sizes = {"hidden_size": 64, "vocab_size": VOCAB_SIZE, "num_heads": 4, "num_kv_heads": 2}
    head = write_tiny_eagle(path / "head", **sizes)
    (head / "tokens.json").write_text(json.dumps(list(range(VOCAB_SIZE))[::-1]))
    return path


def outputs(tmp_path: Path, folder: Path, num_ranks: int, names: list[str]) -> dict[str, Any]:
    results = tmp_path / "results"
    module = ["-m", "tests.distributed.world", str(results), str(folder), *names]
    world = run_world(num_ranks, module)
    assert world.returncode == 0, world.output
    found: dict[str, Any] = json.loads(results.read_text())
    assert list(found) == names
    return found


def check(tmp_path: Path, folder: Path, num_ranks: int, names: list[str]) -> None:
    found = outputs(tmp_path, folder, num_ranks, names)
    for name in names:
        expected = (CASES | GRID)[name].outputs(str(folder), 1)
        assert found[name] == json.loads(json.dumps(expected)), name


def test_two_ranks_emit_the_tokens_of_one(tmp_path: Path, folder: Path) -> None:
    check(tmp_path, folder, 2, list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_every_way_of_speculating_emits_the_tokens_of_one_rank(
    name: str, tmp_path: Path, folder: Path
) -> None:
    check(tmp_path, folder, 2, [name])


@pytest.mark.slow
def test_four_ranks_with_replicated_heads_emit_the_tokens_of_one(
    tmp_path: Path, folder: Path
) -> None:
    check(tmp_path, folder, 4, ["plain-experts", "divided-experts"])
