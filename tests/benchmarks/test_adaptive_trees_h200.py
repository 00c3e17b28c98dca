"""`benchmarks/adaptive_trees_h200.py`: scripted acceptance is played by the trees of an engine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import adaptive_trees_h200
from benchmarks.adaptive_trees_h200 import STEPS, TOPK, ZOO, Cells, misses
from benchmarks.harness import engine as driven_rounds
from benchmarks.harness.forced_trees import Profile, scripted_candidates
from benchmarks.harness.models import Models
from benchmarks.harness.report import Options
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController


@pytest.fixture(scope="module")
def cells() -> Iterator[Cells]:
    script = torch.zeros(STEPS, TOPK)
    with scripted_candidates(script):
        cells = Cells(
            Models("zoo", "cpu", Path()), script, replace(ZOO, batch_sizes=(8,), room=1500)
        )
        yield cells
        cells._rounds.stop()
        cells._rounds.executor.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("profile", [Profile(0.6), Profile(0.8, 0.8)], ids=lambda each: each.name)
@pytest.mark.parametrize("shape", ["5", "5x8/31"])
def test_as_many_drafts_are_accepted_as_the_script_promises(
    cells: Cells, shape: str, profile: Profile
) -> None:
    rounds = cells._rounds
    [tier] = [tier for tier in cells._static if str(cells._shapes.name(tier)) == shape]
    rounds.start(8, 8)
    rounds.set_profile(profile)
    block = rounds.play(AdaptiveController.fixed(tier), rounds=50)
    assert set(block.rounds_by_draft_len) == {tier}
    assert block.counted == pytest.approx(block.tokens, rel=0.06)


def test_profiles_say_what_each_depth_and_rank_is_worth() -> None:
    assert Profile(0.8, 0.5).expected(chain_of(2)) == pytest.approx(1 + 0.8 + 0.8 * 0.4)
    first, second = Profile(0.8, 0.5).rates(2, 3)
    assert first == pytest.approx((0.8, 0.2 * 0.35, 0.2 * 0.65 * 0.25))
    assert second[0] == pytest.approx(0.4)


def test_a_run_has_a_row_for_each_cell_and_names_missed_bars(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = replace(ZOO, batch_sizes=(1,), profiles=(Profile(0.6),), static_rounds=1)
    monkeypatch.setattr(adaptive_trees_h200, "ZOO", sizes)
    monkeypatch.setattr(driven_rounds, "WARM_UP_ROUNDS", 1)
    [row] = adaptive_trees_h200.cells(Options(True, "cpu", "zoo"))
    assert list(row["static"]) == ["0", "1", "2", "3", "5", "3x2/7", "4x4/15", "5x8/31"]
    assert sum(row["played"].values()) == sizes.adaptive_rounds
    row |= {"over_best": 0.99, "best_over_chain": 1.1, "over_chain": 1.09}
    assert not misses(row) and misses(row | {"over_best": 0.97})
    assert misses(row | {"over_chain": 1.0})
    assert "missed" in adaptive_trees_h200.cells_table([row | {"over_best": 0.97}])[-1]
