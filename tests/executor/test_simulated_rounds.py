"""The cost model in a simulated engine: its shares of the best static length."""

import pytest

from tests.executor import simulated_rounds as adaptive
from tests.executor.simulated_rounds import GRAPH_BATCH_SIZES, MAX_STEPS, Simulator, steady
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController


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
