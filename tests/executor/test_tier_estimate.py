"""Expected tokens of chains and trees from what paths showed, at a known acceptance."""

from random import Random

import pytest

from tests.executor.simulated_trees import by_rank, draw, expected, num_accepted
from tllm_spec.config.adaptive_config import AdaptiveConfig
from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN, DraftShape, DraftShapes, chain_of
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.estimates import (
    AcceptanceEstimate,
    chain_counts,
    columns_of,
)
from tllm_spec.executor.speculative.draft_length.round_times import MeasuredRoundTimes

LARGE, SMALL = DraftShape(3, 12, 4), DraftShape(2, 4, 3)
SHAPES = DraftShapes([chain_of(length) for length in range(4)], [LARGE, SMALL], LARGE)
LADDER = (0, 1, 3, 4, 5)
CHEAP = {"max_draft_len": 2, "dynamic_tree_max_topK": 3, "max_total_draft_tokens": 4}
FIRST = 0.55


def learned(tier: int) -> AcceptanceEstimate:
    """The estimate after rounds of one tier."""
    batch = 32
    trees = {4: SMALL, 5: LARGE}
    estimate, chance = AcceptanceEstimate(LADDER, 0.8, 4000.0, trees), Random(tier)
    for _ in range(150):
        ranks = [draw(chance, SHAPES.of(tier), FIRST) for _ in range(batch)]
        accepted = list(map(num_accepted, ranks))
        estimate.observe(ObservedRound(batch, accepted, tier, ranks=ranks), tier)
    return estimate


def test_tiers_after_the_lengths_are_trees_by_their_number_of_drafts() -> None:
    assert [SHAPES.of(tier) for tier in (3, 4, 5)] == [chain_of(3), SMALL, LARGE]
    assert [SHAPES.name(tier) for tier in (3, 4)] == [3, "2x3/4"]
    assert SHAPES.tier_of(LARGE) == 5 and SHAPES.longest == LARGE
    assert [SHAPES.tier_within(rows) for rows in (1, 4, 5, 13)] == [0, 3, 4, 5]


@pytest.mark.parametrize("tier", [4, 5])
def test_rounds_of_a_tree_tell_what_every_chain_and_tree_would_have_accepted(tier: int) -> None:
    estimate = learned(tier)
    for other in (1, 3, 4, 5):
        if SHAPES.of(other).depth <= SHAPES.of(tier).depth:
            truth = expected(SHAPES.of(other), FIRST) - 1
            assert estimate.expected[other] == pytest.approx(truth, rel=0.05)
    further = estimate.state()["further_children"]
    share = by_rank(FIRST, 2)[1] / (1 - FIRST)
    assert further[0] == pytest.approx(share, abs=0.04)


def test_a_chain_tells_its_own_acceptance_and_leaves_further_children_to_the_prior() -> None:
    estimate = learned(3)
    assert estimate.expected[3] == pytest.approx(expected(chain_of(3), FIRST) - 1, rel=0.05)
    assert estimate.state()["further_children"] == [0.35, 0.2333, 0.175]


def test_trees_that_accept_more_than_their_rates_predict_gain() -> None:
    estimate = learned(5)
    assert estimate.gain == pytest.approx(1.0, abs=0.05)
    before = estimate.expected[4] / estimate.gain
    ended = [END + 4, NOTHING, NOTHING, NOTHING]  # what the rates say stays the same
    for _ in range(100):
        estimate._compare(5, [3] * 32)
    estimate.observe(ObservedRound(1, [0], 5, ranks=[ended]), 5)
    assert estimate.gain > 1.3
    assert estimate.expected[4] == pytest.approx(before * estimate.gain, rel=0.1)
    for _ in range(2000):
        estimate.observe(ObservedRound(1, [], 0), 0)
    assert estimate.gain == pytest.approx(1.0, abs=0.05), "trees are tried again some day"


def test_a_path_that_left_the_first_children_tells_a_chain_where_it_would_have_ended() -> None:
    rows = [
        [0, 1, OFF_CHAIN + 0, OFF_CHAIN + END],  # a chain would have accepted one of two tried
        [0, 0, END, NOTHING],  # two of two: the tree ended there
        [END + 3, NOTHING, NOTHING, NOTHING],
    ]
    assert chain_counts(columns_of(rows)) == [(3, 2), (2, 1), (0, 0), (0, 0)]


def test_a_probe_of_a_tree_that_takes_less_time_pays_for_the_tokens_that_it_lacks() -> None:
    config = AdaptiveConfig.parse({"candidate_steps": [3], "candidate_trees": [CHEAP]}, 3)
    times = MeasuredRoundTimes({8: {0: 9.0, 1: 9.2, 2: 9.4, 3: 10.0, 4: 9.5}})
    shapes = DraftShapes([chain_of(length) for length in range(4)], [SMALL], LARGE)
    own = AdaptiveController.from_config(config, round_times=times, shapes=shapes)
    chance, asked = Random(1), []
    for _ in range(1500):
        asked.append(own.tier_for(8))
        ranks = [draw(chance, shapes.of(asked[-1]), 0.75) for _ in range(8)]
        own.observe(ObservedRound(8, list(map(num_accepted, ranks)), asked[-1], ranks=ranks))
    assert own.state()["slots"]["1"]["steps"] == {"8": 3}
    assert asked[500:].count(4) < 0.2 * 1000
