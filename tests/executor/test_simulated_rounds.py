"""The cost model in a simulated engine: its shares of the best static length."""

import subprocess
import sys
from itertools import product
from math import prod
from pathlib import Path
from random import Random

import pytest

from tests.executor import simulated_rounds as adaptive
from tests.executor import simulated_trees as trees
from tests.executor.played_rounds import controller
from tests.executor.simulated_rounds import GRAPH_BATCH_SIZES, MAX_STEPS, Simulator, steady
from tests.executor.simulated_trees import TreeSimulator, draw, expected, num_accepted
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape, chain_of
from tllm_spec.config.speculative_config import Eagle3DecodingConfig
from tllm_spec.executor.speculative.draft_length import cost_model
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, controller_for
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.estimates import expected_accepted
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes


@pytest.mark.thinned
@pytest.mark.parametrize("batch_size", adaptive.BATCH_SIZES)
def test_no_steady_traffic_is_served_worse_than_by_the_best_static_length(batch_size: int) -> None:
    shares = {
        acceptance: adaptive.steady_cell(batch_size, acceptance, seconds=8.0, seed=7)
        for acceptance in adaptive.ACCEPTANCES
    }
    assert min(shares.values()) >= adaptive.MIN_STEADY, shares


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", adaptive.MOVING)
def test_moving_traffic_is_served_better_than_by_any_static_length(kind: str) -> None:
    statics = [
        adaptive.moving_rate(AdaptiveController.fixed(steps), kind, seconds=40.0, seed=7)
        for steps in range(MAX_STEPS + 1)
    ]
    controls = adaptive.controller()
    rate = adaptive.moving_rate(controls, kind, seconds=40.0, seed=7)
    assert rate >= adaptive.MIN_MOVING * max(statics), (statics, rate)


def test_drafts_that_are_never_right_cost_little_from_the_first_round_on() -> None:
    rows = adaptive.hopeless_rates(seeds=1)
    assert min(row["1000"] for row in rows) >= adaptive.MIN_STEADY, rows
    assert min(row["200"] for row in rows) >= 0.97, rows


def test_errors_of_the_measured_round_times_push_few_cells_below_the_bar() -> None:
    assert 0 < adaptive.share_of_misjudged_cells(seeds=4) < 0.06


def test_the_simulator_counts_what_the_formula_says() -> None:
    fixed = Simulator(AdaptiveController.fixed(3), adaptive.TRUE_TIMES, seed=7)
    rate = fixed.run(steady(8, 0.6), seconds=2.0).rate
    assert rate == pytest.approx(adaptive.static_rates(8, 0.6)[3], rel=0.002)


def test_the_simulator_draws_what_it_counts() -> None:
    controls = AdaptiveController.from_config(
        {"candidate_steps": [3], "window_trials": 64_000},
        graph_batch_sizes=GRAPH_BATCH_SIZES,
        round_times=adaptive.TIMES,
    )
    Simulator(controls, adaptive.TRUE_TIMES, seed=7).run(steady(64, 0.7), seconds=8.0)
    assert controls.state()["slots"]["1"]["acceptance"][:3] == pytest.approx([0.7] * 3, abs=0.03)


def test_the_example_table_is_what_its_note_says() -> None:
    # 128 requests, 3 drafts: 10 ms plain, linears of 512 rows instead of 128, three drafts.
    assert adaptive.TRUE_TIMES(128, 3) * 1e3 == pytest.approx(10 + 2 * 7.14 - 4.79 + 0.75)
    assert adaptive.TRUE_TIMES(3, 0) == adaptive.TRUE_TIMES(4, 0) == pytest.approx(0.0045)


# Adaptive trees in a simulated engine: their shares of the best static chain or tree.


@pytest.mark.parametrize("batch_size", [1, 8, 16])
def test_adaptive_trees_serve_no_cell_worse_than_its_best_shape(batch_size: int) -> None:
    rows = [trees.cell(batch_size, first, seed=7, seconds=6.0) for first in (0.2, 0.6, 0.9)]
    assert not any(map(trees.misses, rows)), rows
    assert any(isinstance(row["best"], str) for row in rows)


def test_the_best_shape_is_a_tree_in_some_cells_and_a_chain_in_others() -> None:
    best = [max(range(9), key=trees.static_rates(size, 0.6).__getitem__) for size in (1, 32)]
    assert best[0] in trees.SHAPES.further_tiers and best[1] not in trees.SHAPES.further_tiers


def test_the_simulator_draws_what_it_counts_with_simulated_trees() -> None:
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


# The policies are pure Python.


ROOT = Path(__file__).resolve().parent.parent.parent
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of torch raises ImportError
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
for config in ({}, "aggressive", {"strategy": "ema", 1: {"candidate_steps": [1, 3]}}):
    controls = AdaptiveController.from_config(config)
    steps = controls.tier_for(4)
    controls.observe(ObservedRound(4, [steps] * 4))
    print(steps, type(controls.state()).__name__)
"""


def test_the_controller_works_where_there_is_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["3", "dict", "3", "dict", "3", "dict"]


# Expected accepted drafts of a tree, against every path of the tree written out.


RATES = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05], [0.4, 0.2, 0.2]]


@pytest.mark.parametrize(("depth", "topk", "num_nodes"), [(3, 3, 7), (3, 2, 14), (2, 3, 30)])
def test_a_dynamic_tree_has_the_likeliest_paths(depth: int, topk: int, num_nodes: int) -> None:
    paths = [path for length in range(1, depth + 1) for path in product(range(topk), repeat=length)]
    chances = sorted(
        (prod(RATES[d][r] for d, r in enumerate(path)) for path in paths), reverse=True
    )
    found = expected_accepted(DraftShape(depth, num_nodes, topk), RATES)
    assert found == pytest.approx(sum(chances[:num_nodes]))


def test_a_chain_and_a_static_tree_have_their_own_paths() -> None:
    assert expected_accepted(chain_of(3), RATES) == pytest.approx(0.6 + 0.3 + 0.12)
    assert expected_accepted(NO_DRAFTS, RATES) == 0.0
    choices = ((0,), (2,), (2, 1))
    assert expected_accepted(DraftShape(2, 3, 3, choices), RATES) == pytest.approx(0.725)


@pytest.mark.parametrize(("draft_ms", "are_rarer"), [(3.0, False), (4.5, True)])
def test_trials_in_vain_make_drafts_that_hardly_pay_rarer_and_good_ones_not(
    monkeypatch: pytest.MonkeyPatch, draft_ms: float, are_rarer: bool
) -> None:
    """A plain round takes 10 ms, and 45% of the drafts are accepted: 4.5 ms are what one brings."""

    def num_drafted(doubt: float) -> int:
        monkeypatch.setattr(cost_model, "DOUBT", doubt)
        controls = controller(
            draft_ms, candidate_steps=[0, 1], window_trials=32.0, probe_time_share=0.05
        )
        draws, asked = Random(0), list[int]()
        for _ in range(6000):
            asked.append(controls.tier_for(1))
            accepted = [int(draws.random() < 0.45)] if asked[-1] else []
            controls.observe(ObservedRound(1, accepted, asked[-1]))
        return sum(asked)

    doubting, without = num_drafted(cost_model.DOUBT), num_drafted(0.0)
    assert (doubting < 0.9 * without) is are_rarer
    assert are_rarer or doubting > 0.98 * without
