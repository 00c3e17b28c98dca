"""The bars of `benchmarks/adaptive.py` with few rounds and a fixed seed."""

import pytest

from benchmarks import adaptive, adaptive_engine
from benchmarks.adaptive_simulator import GRAPH_BATCH_SIZES, Simulator, steady
from benchmarks.adaptive_simulator import phases as simulated_phases
from tllm_spec import LLM
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController


@pytest.mark.parametrize("batch_size", adaptive.BATCH_SIZES)
def test_no_steady_traffic_is_served_worse_than_by_the_best_static_length(batch_size: int) -> None:
    shares = {
        acceptance: adaptive.steady_cell(
            adaptive.COST_MODEL, batch_size, acceptance, seconds=8.0, seed=7
        )
        for acceptance in adaptive.ACCEPTANCES
    }
    assert min(shares.values()) >= adaptive.MIN_STEADY, shares


@pytest.mark.parametrize("kind", adaptive.MOVING)
def test_moving_traffic_is_served_better_than_by_any_static_length(kind: str) -> None:
    statics, rates = adaptive.moving_rates(
        kind, seconds=40.0, seed=7, policies=[adaptive.COST_MODEL]
    )
    assert rates[adaptive.COST_MODEL] >= adaptive.MIN_MOVING * max(statics), (statics, rates)


def test_drafts_that_are_never_right_cost_little_even_in_the_first_rounds_of_all() -> None:
    rows = adaptive.measure_hopeless(seeds=1)
    assert min(row["1000"] for row in rows) >= adaptive.MIN_STEADY, rows
    assert min(row["200"] for row in rows) >= 0.97, rows


def test_errors_of_start_up_s_times_matter_less_where_rounds_were_timed_with_contexts_too() -> None:
    shares = adaptive.measure_misjudged(seeds=8)
    assert 0 < shares["with and without"] < 0.6 * shares["without contexts"], shares


def test_the_simulator_counts_what_the_formula_says() -> None:
    fixed = Simulator(AdaptiveController.fixed(3), adaptive.TRUE_TIMES, seed=7)
    rate = fixed.run(steady(8, 0.6), seconds=2.0).rate
    assert rate == pytest.approx(adaptive.static_rates(8, 0.6)[3], rel=0.002)


def test_the_simulator_draws_what_it_counts() -> None:
    controls = AdaptiveController.from_config(
        {"candidate_steps": [3], "window_rounds": 1000},
        graph_batch_sizes=GRAPH_BATCH_SIZES,
        round_times=adaptive.TIMES,
    )
    Simulator(controls, adaptive.TRUE_TIMES, seed=7).run(steady(64, 0.7), seconds=8.0)
    assert controls.state()["slots"]["1"]["acceptance"][:3] == pytest.approx([0.7] * 3, abs=0.03)


def test_the_example_table_is_what_its_note_says() -> None:
    # 128 requests, 3 drafts: 10 ms plain, linears of 512 rows instead of 128, three drafts.
    assert adaptive.TRUE_TIMES(128, 3) * 1e3 == pytest.approx(10 + 2 * 7.14 - 4.79 + 0.75)
    assert adaptive.TRUE_TIMES(3, 0) == adaptive.TRUE_TIMES(4, 0) == pytest.approx(0.0045)


def test_the_real_engine_s_figure_is_a_ratio_of_neighbours_over_the_best_static_length() -> None:
    seconds = {
        "0": [1.0, 2.0, 1.0],
        "1": [0.5, 1.0, 0.5],
        "3": [2.0, 2.0, 2.0],
        "5": [9.0, 0.1, 9.0],
    }
    found = adaptive_engine.row(
        "ngram", "copying", 100, seconds | {"adaptive": [0.5, 0.5, 0.4]}, 2.0
    )
    assert (found.best_static, found.tokens_per_second["adaptive"]) == (1, 200.0)
    assert (found.lowest, found.adaptive_over_best, found.highest) == (1.0, 1.25, 2.0)
    assert (
        "| ngram | copying | 100 / 200 / 50 / 11 | 200 | 1 | **1.25** (1.00–2.00) | 1.00 |"
        in adaptive_engine.table([found])
    )


def test_of_moving_traffic_the_table_has_what_the_best_length_of_each_phase_would_give() -> None:
    comparison = adaptive_engine.Comparison(96, list(adaptive_engine.DRAFTERS))
    comparison.phases = comparison.phases[:2]
    seconds = {
        "0": (3.0, 1.0),
        "1": (1.0, 2.0),
        "3": (2.0, 2.0),
        "5": (2.0, 2.0),
        "adaptive": (1.0, 1.0),
    }
    for name, times in seconds.items():
        for phase, time in zip(comparison.phases, times, strict=True):
            for drafter in adaptive_engine.DRAFTERS:
                key = ("" if name == "0" else drafter, name)
                comparison.seconds.setdefault(key, {})[phase.name] = [time]
                comparison.acceptance[drafter + "adaptive", phase.name] = 1.0
    copying, free, moving, *_ = comparison.rows()
    assert (copying.best_static, free.best_static, moving.best_static) == (1, 0, 1)
    assert (copying.perfect_over_best, moving.perfect_over_best) == (1.0, 1.5)


def test_the_traffic_of_the_real_engine_moves_between_repeating_and_other_text() -> None:
    copying, free, *_ = adaptive_engine.phases()
    length = adaptive_engine.PROMPT_LEN
    assert all(prompt[:length] == prompt[length : 2 * length] for prompt in copying.prompts)
    assert all(len(prompt) == length for prompt in free.prompts)
    assert adaptive_engine.speculation("ngram", 0) is None
    spec = adaptive_engine.speculation("eagle3", None)
    assert spec is not None and spec["adaptive"]["candidate_steps"] == [0, 1, 3, 5]


def test_scripted_traffic_moves_as_the_simulator_s_phases_do_with_one_request_and_with_eight() -> (
    None
):
    phases = adaptive_engine.scripted_phases()
    assert [(phase.acceptance, phase.at_once) for phase in phases[3:5]] == [(0.15, 1), (0.9, 8)]
    for number, phase in enumerate(phases):
        assert phase.acceptance == simulated_phases(1.0)(number)[0]
        assert len(phase.prompts) >= phase.at_once and phase.temperature == 0
    static, adaptive = (
        adaptive_engine.speculation("eagle3", length, scripted=True) for length in (3, None)
    )
    assert (
        static is not None
        and len(static["synthetic_acceptance_rates"]) == 3
        and "adaptive" not in static
    )
    assert adaptive is not None and len(adaptive["synthetic_acceptance_rates"]) == 5


def test_a_scripted_phase_has_the_acceptance_that_it_says_and_leaves_plain_decoding_alone() -> None:
    prompt = adaptive_engine.scripted_phases()[0].prompts[:1]
    spec = adaptive_engine.speculation("draft_target_one_model", 3, scripted=True)
    with LLM("zoo:llama", **adaptive_engine.SMALL, speculative_config=spec) as llm:
        for acceptance, tokens_a_round in ((1.0, 4.0), (0.0, 1.0)):
            phase = adaptive_engine.Phase("scripted", prompt, 1, 0.0, acceptance)
            assert adaptive_engine.serve(llm, phase, 17)[1] == tokens_a_round
    with LLM("zoo:llama", **adaptive_engine.SMALL) as plain:
        assert adaptive_engine.serve(plain, phase, 4)[1] == 0
