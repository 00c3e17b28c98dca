"""`verify_budget`: the rows of a round, and what it is refused with."""

from typing import Any

import pytest

from tllm_spec.config.speculative_config import (
    DecodingBaseConfig,
    Eagle3DecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)


def config(**options: Any) -> Eagle3DecodingConfig:
    return Eagle3DecodingConfig(**{"max_draft_len": 7, "speculative_model": "head"} | options)


TREE = {"use_dynamic_tree": True, "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 24}
STATIC = {"eagle_choices": [[0], [1], [0, 0], [0, 0, 0]], "max_draft_len": 3}


def test_a_round_has_so_many_rows_a_request_on_average() -> None:
    shapes = config(verify_budget=2.5).shapes
    assert [shapes.of(length).num_rows(4) for length in (0, 1, 2, 7)] == [4, 8, 10, 10]
    assert shapes.of(7).num_rows(1) == 3 and shapes.of(7).window == 8
    assert [shapes.of(length).name for length in (1, 2, 7)] == ["1", "2@2.5", "7@2.5"]
    assert not config(verify_budget=8).shapes.are_ragged


def test_a_cost_model_has_rounds_that_share_rows_by_length() -> None:
    shapes = config(enable_adaptive_verification=True).shapes
    names = [shapes.name(tier) for tier in shapes.budgeted_tiers]
    assert names == ["3@2.5", "5@3.5", "7@4.5"]
    assert shapes.budgets[:4] == [(1, 2), (2, 3), (3, 4), (3, 2.5)]


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
    "sharing", [{"verify_budget": 2.5}, {"enable_adaptive_verification": True}]
)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Eagle3DecodingConfig, TREE | {"speculative_model": "head", "max_draft_len": 7}),
        (Eagle3DecodingConfig, STATIC | {"speculative_model": "head"}),
        (NGramDecodingConfig, TREE | {"max_draft_len": 5}),
        (
            UserProvidedDecodingConfig,
            {"drafter": "a:B", "max_draft_len": 3, "max_total_draft_tokens": 5},
        ),
    ],
)
def test_trees_are_refused_with_what_to_use_instead(
    kind: type[DecodingBaseConfig], options: dict[str, Any], sharing: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"is refused: .*not of draft trees; use a chain"):
        kind(**options | sharing)


def test_all_reasons_come_in_one_message() -> None:
    with pytest.raises(ValueError, match=r"adaptive also says.*; use a chain; with use_rej"):
        config(verify_budget=2.5, adaptive={}, use_rejection_sampling=True, **TREE)


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
        ({"adaptive": {"candidate_steps": list(range(20))}, "max_draft_len": 19}, "make 36"),
    ],
)
def test_its_choice_is_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**{"enable_adaptive_verification": True} | options)
