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
from tllm_spec.config.draft_shape import chain_of
from tllm_spec.config.verify_budget import with_budgets
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController

SHAPES = with_budgets(7, STEPS)


@pytest.mark.parametrize(("means", "least"), [(MIXED, 1.4), ((0.6,), 1.03)])
def test_the_choice_reaches_most_of_what_true_probabilities_would(
    means: tuple[float, ...], least: float
) -> None:
    """And more than chains with as many rows, whose drafts are one shorter."""
    simulation, shape = Simulation(32, means), SHAPES.of(SHAPES.budgeted_tiers[1])
    assert shape.name == "3@3"
    found, chains = simulation.play(shape, 30), simulation.play(chain_of(2), 30)
    assert found.reached > 0.97 * found.oracle
    longest = simulation.play(SHAPES.of(SHAPES.budgeted_tiers[3]), 30)
    gain = (longest.reached - 32) / (simulation.play(chain_of(3), 30).reached - 32)
    assert found.reached > chains.reached and gain > least


def test_round_times_are_those_measured_at_chains() -> None:
    measured = [round_ms(chain_of(length), 64) for length in (0, 1, 2, 3, 5)]
    assert measured == pytest.approx([6.18, 7.13, 8.59, 10.11, 13.67], abs=0.01)
    assert measured[2] < round_ms(SHAPES.of(SHAPES.budgeted_tiers[1]), 64) < measured[3]


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
        assert 1.4 < block.tokens / block.rounds / 20 < 1.5  # the drafter's noise chooses
        measurement.rounds.stop()
    assert torch.isfinite(script.total).all() and verify_budget.SUBJECTS
