"""Several ranks emit the tokens of one. A world of ranks is started once for many cases, since each
of its processes imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import ALL, CASES, FAMILIES, GRID
from tests.distributed.tiny_models import save_tiny
from tests.distributed.worlds import run_world

pytest.importorskip("mpi4py")
LONG = (
    "adaptive-draft-model",
    "adaptive-trees",
    "draft-model-token-map-one-model",
    "plain-experts",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def outputs(tmp_path: Path, folder: Path, num_ranks: int, names: list[str]) -> dict[str, Any]:
    for name in {ALL[name].model for name in names} | {"eagle", "eagle3"}:
        if not name.startswith("zoo:"):
            save_tiny(folder, name)
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
        expected = ALL[name].outputs(str(folder), 1)
        assert found[name] == json.loads(json.dumps(expected)), name


def test_two_ranks_emit_the_tokens_of_one(tmp_path: Path, folder: Path) -> None:
    check(tmp_path, folder, 2, [name for name in CASES if name not in LONG])


@pytest.mark.slow
def test_two_ranks_with_long_cases_emit_the_tokens_of_one(tmp_path: Path, folder: Path) -> None:
    check(tmp_path, folder, 2, list(LONG))


@pytest.mark.slow
@pytest.mark.parametrize("name", GRID)
def test_every_way_of_speculating_emits_the_tokens_of_one_rank(
    name: str, tmp_path: Path, folder: Path
) -> None:
    check(tmp_path, folder, 2, [name])


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({case.model for case in FAMILIES.values()}))
def test_sliced_layers_and_divided_experts_emit_the_tokens_of_one_rank(
    model: str, tmp_path: Path, folder: Path
) -> None:
    names = [name for name, case in FAMILIES.items() if case.model == model]
    check(tmp_path, folder, 2, names)


@pytest.mark.slow
def test_four_ranks_with_replicated_heads_emit_the_tokens_of_one(
    tmp_path: Path, folder: Path
) -> None:
    names = ["plain-experts", "divided-experts", "deepseek-v3-mtp-tp", "deepseek-v3-mtp-ep"]
    check(tmp_path, folder, 4, names)
