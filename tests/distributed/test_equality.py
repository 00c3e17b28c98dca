"""Several ranks emit the tokens of one. A world of ranks is started once for many cases, since each
of its processes imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.cases import ALL, CASES, FAMILIES, GRID
from tests.distributed.tiny_models import save_tiny
from tests.distributed.world import EXCHANGES
from tests.distributed.worlds import run_world

pytest.importorskip("mpi4py")
DRAFTERS = {
    *("dflash", "dflash2", "dspark", "eagle", "eagle3", "eagle3-latent", "gemma4-assistant"),
    "other-tokenizer",
}
LONG = (
    "adaptive-draft-model",
    "adaptive-trees",
    "dflash",
    "dflash2",
    "dspark",
    "dspark-budget",
    "divided-experts",
    "draft-model-other-tokenizer",
    "draft-model-token-map-one-model",
    "eagle",
    "eagle3-sa",
    "eagle3-sa-tree",
    "fp8",
    "fp8-by-token",
    "fp8-experts-by-token",
    "fp8-parts",
    "gemma3",
    "gemma4",
    "gemma4-assistant",
    "gemma4-experts",
    "gemma4-experts-parts",
    "gemma4-per-layer",
    "glm-5-mtp",
    "latent-head",
    "latent-head-of-latents",
    "llama4-parts",
    "minimax-m2",
    "minimax-m2-parts",
    "ministral3",
    "mistral4",
    "olmo2",
    "pard",
    "peagle",
    "phi3",
    "plain-experts",
    "qwen3.5-fp8-mtp",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def outputs(tmp_path: Path, folder: Path, num_ranks: int, names: list[str]) -> dict[str, Any]:
    cases = [ALL[name] for name in names if name in ALL]
    options = str([case.options for case in cases])
    drafters = {name for name in DRAFTERS if f"{{folder}}/{name}'" in options}
    for name in {case.model for case in cases} | drafters:
        if not name.startswith("zoo:"):
            save_tiny(folder, name)
    results = tmp_path / "results"
    module = ["-m", "tests.distributed.world", str(results), str(folder), *names]
    world = run_world(num_ranks, module)
    assert world.returncode == 0, world.output
    found: dict[str, Any] = json.loads(results.read_text())
    assert list(found) == names
    return found


def assert_outputs_of_one_rank(found: dict[str, Any], folder: Path) -> None:
    for name, outputs in found.items():
        expected = ALL[name].outputs(str(folder), 1)
        assert outputs == json.loads(json.dumps(expected)), name


def check(tmp_path: Path, folder: Path, num_ranks: int, names: list[str]) -> None:
    assert_outputs_of_one_rank(outputs(tmp_path, folder, num_ranks, names), folder)


@pytest.fixture(scope="module")
def two_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks gave, by name."""
    names = [name for name in CASES if name not in LONG] + list(EXCHANGES)
    return outputs(tmp_path_factory.mktemp("world"), folder, 2, names)


def test_two_ranks_emit_the_tokens_of_one(two_ranks: dict[str, Any], folder: Path) -> None:
    compared = {name: found for name, found in two_ranks.items() if name in ALL}
    assert_outputs_of_one_rank(compared, folder)


def test_the_exchange_of_best_tokens_sends_little_and_changes_no_text(
    two_ranks: dict[str, Any],
) -> None:
    """All logits are gathered where sampling needs more."""
    exchanged, gathered = two_ranks["gathered_bytes"]
    for way, found in exchanged.items():
        assert found["tokens"] == gathered[way]["tokens"], way
        logits, offers = gathered[way]["row_bytes"], [16]  # two ranks' values and tokens
        assert min(logits) >= 400  # 100 in float32
        if way in ("greedy", "sampled"):
            assert found["row_bytes"] == offers, way
        elif way == "filtered":  # drafts are filtered, too
            assert found["row_bytes"] == logits
        else:  # drafts are exchanged
            assert set(offers) < set(found["row_bytes"]) <= {*offers, *logits}, way
    assert exchanged["greedy"]["tokens"] != exchanged["sampled"]["tokens"]


def test_ranks_that_share_a_device_are_counted_when_they_join(two_ranks: dict[str, Any]) -> None:
    """CUDA graphs hold the sums of ranks that do not share a GPU."""
    expected = [[[2, True]] * 2, [[2, False]] * 2, [[1, True]] * 2]
    assert two_ranks["ranks_on_devices"] == expected


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
