"""Adaptive trees in a simulated engine: their shares of the best static chain or tree."""

from random import Random

import pytest

from tests.executor import simulated_trees as trees
from tests.executor.simulated_trees import TreeSimulator, draw, expected, num_accepted
from tllm_spec.config.speculative_config import Eagle3DecodingConfig
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, controller_for
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes


@pytest.mark.parametrize("batch_size", [1, 8, 16])
def test_adaptive_trees_serve_no_cell_worse_than_its_best_shape(batch_size: int) -> None:
    rows = [trees.cell(batch_size, first, seed=7, seconds=6.0) for first in (0.2, 0.6, 0.9)]
    assert not any(map(trees.misses, rows)), rows
    assert any(isinstance(row["best"], str) for row in rows)


def test_the_best_shape_is_a_tree_in_some_cells_and_a_chain_in_others() -> None:
    best = [max(range(9), key=trees.static_rates(size, 0.6).__getitem__) for size in (1, 32)]
    assert best[0] in trees.SHAPES.further_tiers and best[1] not in trees.SHAPES.further_tiers


def test_the_simulator_draws_what_it_counts() -> None:
    shape, chance = trees.SHAPES.of(8), Random(3)
    rows = [draw(chance, shape, 0.6) for _ in range(4000)]
    accepted = sum(map(num_accepted, rows))
    assert 1 + accepted / 4000 == pytest.approx(expected(shape, 0.6), rel=0.02)


def test_a_fixed_tree_has_its_exact_rate() -> None:
    fixed = TreeSimulator(AdaptiveController.fixed(8), trees.SHAPES, trees.TIMES, seed=1)
    rate = fixed.run(4, 0.6, 4.0).rate
    assert rate == pytest.approx(trees.static_rates(4, 0.6)[8], rel=0.01)


def test_a_single_length_tries_a_tree_that_nothing_speaks_for_yet() -> None:
    adaptive = {"candidate_steps": [0], "prior_acceptance": 0.01}
    spec = Eagle3DecodingConfig(**trees.OPTIONS, adaptive=adaptive)
    table = MeasuredRoundTimes({size: dict(enumerate(row)) for size, row in trees.TIMES.items()})
    controls = controller_for(spec, graph_batch_sizes=trees.BATCH_SIZES, round_times=table)
    assert controls.tier_for(32) == 0
    TreeSimulator(controls, spec.shapes, trees.TIMES, seed=7).run(32, 0.9, 8.0)
    assert controls.state()["slots"]["1"]["steps"] == {"32": "3x2/7"}
