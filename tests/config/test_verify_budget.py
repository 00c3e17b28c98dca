"""`verify_budget`: the rows of a round, and what it is refused with."""

from typing import Any

import pytest

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.config.speculative_config import Eagle3DecodingConfig, UserProvidedDecodingConfig


def config(**options: Any) -> Eagle3DecodingConfig:
    return Eagle3DecodingConfig(**{"max_draft_len": 7, "speculative_model": "head"} | options)


TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 24}


def test_a_round_has_so_many_rows_a_request_on_average() -> None:
    shapes = config(verify_budget=2.5).shapes
    assert [shapes.of(length).num_rows(4) for length in (0, 1, 2, 7)] == [4, 8, 10, 10]
    assert shapes.of(7).num_rows(1) == 3 and shapes.of(7).window == 8
    assert [shapes.of(length).name for length in (1, 2, 7)] == ["1", "2@2.5", "7@2.5"]
    assert not config(verify_budget=8).shapes.are_ragged


def test_trees_share_rows_too() -> None:
    dynamic = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 4, "max_draft_len": 3}
    shapes = config(verify_budget=5.5, **dynamic).shapes
    assert [shapes.of(length).name for length in (1, 3)] == ["1x4/4", "3x4/12@5.5"]
    assert [shapes.of(length).num_rows(3) for length in (1, 3)] == [15, 17]
    static = config(verify_budget=2.5, eagle_choices=[[0], [1], [0, 0]], max_draft_len=2).shapes
    assert [static.of(length).name for length in (1, 2)] == ["1x2/2@2.5", "2x2/3@2.5"]
    own = UserProvidedDecodingConfig(
        drafter="a:B", max_draft_len=2, max_total_draft_tokens=5, verify_budget=3
    ).shapes
    assert own.are_ragged and not own.narrows


def test_trees_are_compared_with_chains() -> None:
    shapes = config(enable_adaptive_verification=True, **TREE).shapes
    assert shapes.longest == DraftShape(7, 24, 2)
    names = "3@2.5 3x2/10@4 3x2/10@8 5@3.5 7@4.5 7x2/24@4 7x2/24@8 7x2/24@12"
    assert [shapes.name(tier) for tier in shapes.budgeted_tiers] == names.split()
    assert shapes.budgets[:5] == [(1, 2, 1), (2, 3, 1), (3, 4, 1), (3, 2.5, 1), (3, 4, 2)]
    lower = shapes.lower
    assert lower(shapes.of(10), shapes.of(14)) == 10
    assert lower(shapes.of(3), shapes.of(14)) == 0, "a chain's drafts do not tell of a tree"


def test_a_token_budget_counts_these_rows() -> None:
    assert config(verify_budget=2.5).shapes.tier_within(3) == 7
    assert config().shapes.tier_within(3) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_rejection_sampling": True}, "would change the distribution"),
        ({"adaptive": {}}, "adaptive also says what is verified"),
        ({"verify_budget": 1}, "greater than 1"),
        (
            {"adaptive": {}, "use_rejection_sampling": True},
            "adaptive also says.*; with use_rejection_sampling",
        ),
    ],
)
def test_it_is_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**{"verify_budget": 2.5} | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"adaptive": {"strategy": "ema", "candidate_steps": [1, 7]}},
            "needs adaptive's cost_model",
        ),
        ({"draft_len_schedule": {1: 3}}, "use adaptive's slots"),
        ({"max_draft_len": 2}, "candidate_steps of 3 or more"),
        ({"use_rejection_sampling": True}, "would change the distribution"),
        ({"eagle_choices": [[0], [1], [0, 0], [0, 0, 0]], "max_draft_len": 3}, "dynamic ones"),
        (TREE | {"adaptive": {"candidate_trees": []}}, "leave out candidate_trees"),
        ({"adaptive": {"candidate_steps": list(range(20))}, "max_draft_len": 19}, "make 36"),
    ],
)
def test_its_choice_is_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**{"enable_adaptive_verification": True} | options)
