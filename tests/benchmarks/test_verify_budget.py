"""`benchmarks/verify_budget.py`: how much of the possible the choice of drafts reaches, and that a
running engine counts what it verifies."""

from pathlib import Path

import pytest
import torch

from benchmarks import verify_budget
from benchmarks.harness.models import Models
from benchmarks.harness.scripted_tokens import MIXED, TokenScript, quantiles, scripted_tokens
from benchmarks.harness.simulated_rows import Simulation, round_ms
from benchmarks.verify_budget import STEPS, Measurement
from tllm_spec.config.draft_shape import DraftShape, DraftShapes, chain_of
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

SHAPES = DraftShapes.with_budgets(7, STEPS)


@pytest.mark.parametrize(("means", "least"), [(MIXED, 1.4), ((0.6,), 1.02)])
def test_the_drafts_reach_most_of_what_true_probabilities_would(
    means: tuple[float, ...], least: float
) -> None:
    """And more than chains with as many rows."""
    simulation, shape = Simulation(32, means), DraftShape(7, 7, mean_rows=4)
    found, chains = simulation.play(shape, 30), simulation.play(chain_of(3), 30)
    assert found.reached > 0.97 * found.oracle
    assert (found.reached - 32) / (chains.reached - 32) > least


@pytest.mark.parametrize(("means", "best", "least"), [(MIXED, 3, 1.12), ((0.9,), 5, 0.97)])
def test_the_choice_beats_the_best_length_or_is_as_good(
    means: tuple[float, ...], best: int, least: float
) -> None:
    tiers = (*STEPS, *SHAPES.budgeted_tiers)
    ms = {tier: round_ms(SHAPES.of(tier), 64) for tier in tiers}
    own = AdaptiveController.from_config(
        {"candidate_steps": STEPS}, round_times=MeasuredRoundTimes({64: ms}), shapes=SHAPES
    )
    simulation = Simulation(64, means)
    rate = simulation.play(chain_of(best), 30).reached / ms[best]
    assert simulation.chosen_rate(own, SHAPES, 60) > least * rate


def test_round_times_are_those_measured_at_chains() -> None:
    measured = [round_ms(chain_of(length), 64) for length in (0, 1, 2, 3, 5)]
    assert measured == pytest.approx([6.18, 7.13, 8.59, 10.11, 13.67], abs=0.01)
    assert measured[1] < round_ms(SHAPES.of(SHAPES.budgeted_tiers[0]), 64) < measured[3]


def test_quantiles_have_the_mean() -> None:
    assert float(quantiles(0.6).mean()) == pytest.approx(0.6, abs=0.01)


@pytest.mark.slow
def test_an_engine_counts_what_its_drafts_are_expected_to_bring() -> None:
    script = TokenScript.new(21, STEPS[-1], "cpu")
    script.table.fill_(0.5)
    with scripted_tokens(script):
        measurement = Measurement(Models("zoo", "cpu", Path()), (20,), script)
        measurement.rounds.start(20, 16)
        for length, each in ((0, 1.0), (1, 1.5), (3, 1.875)):
            block = measurement.play(AdaptiveController.fixed(length), 4)
            assert block.tokens / block.rounds / 20 == pytest.approx(each, abs=1e-3)
        tier = measurement.shapes.budgeted_tiers[0]
        block = measurement.play(AdaptiveController.fixed(tier), 4)
        assert 1.5 < block.tokens / block.rounds / 20 < 1.75  # the drafter's noise chooses
        measurement.rounds.stop()
    assert torch.isfinite(script.total).all() and verify_budget.SUBJECTS
