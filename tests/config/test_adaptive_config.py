"""`adaptive`: what is taken, in which spelling, and what the refusals name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tllm_spec.config.adaptive_config import PRESETS, AdaptiveConfig, CostModelOptions, EmaOptions
from tllm_spec.config.speculative_config import (
    DecodingBaseConfig,
    Eagle3DecodingConfig,
    NGramDecodingConfig,
    UserProvidedDecodingConfig,
)

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "adaptive.md"
SLOT = {"candidate_steps": [1, 3]}


def test_a_slot_key_is_an_integer_or_a_string_of_digits() -> None:
    ladders = {
        "ema_alpha": 0.5,
        "1": {"candidate_steps": [7, 1, 3, 3]},
        8: {"candidate_steps": [0]},
    }
    config = AdaptiveConfig.parse(ladders)
    assert [(low, slot.candidate_steps) for low, slot in config.slots] == [
        (1, (1, 3, 7)),
        (8, (0,)),
    ]
    assert config.draft_lens == (0, 1, 3, 7)


def test_a_slot_s_key_wins_over_the_global_one_which_wins_over_the_default() -> None:
    config = AdaptiveConfig.parse(
        {
            "update_interval": 7,
            "up_hysteresis": 0.5,
            "1": SLOT,
            "4": {**SLOT, "up_hysteresis": 1, "ema_alpha": 1},
        }
    )
    assert dict(config.slots) == {
        1: EmaOptions(candidate_steps=(1, 3), update_interval=7, up_hysteresis=0.5),
        4: EmaOptions(candidate_steps=(1, 3), update_interval=7, up_hysteresis=1, ema_alpha=1),
    }


def test_without_a_strategy_the_keys_decide_and_ours_is_the_default() -> None:
    assert isinstance(AdaptiveConfig.parse({}).slots[0][1], CostModelOptions)
    assert isinstance(AdaptiveConfig.parse({"1": SLOT}).slots[0][1], CostModelOptions)
    assert isinstance(
        AdaptiveConfig.parse({"1": {**SLOT, "ceiling_coeff": 0}}).slots[0][1], EmaOptions
    )
    assert isinstance(AdaptiveConfig.parse({"strategy": "ema", "1": SLOT}).slots[0][1], EmaOptions)


def test_the_presets_are_the_document_s_and_the_newest_defaults() -> None:
    ladders = {
        name: {
            low: (slot.candidate_steps, slot.down_hysteresis, slot.ceiling_coeff)
            for low, slot in AdaptiveConfig.parse(name).slots
            if isinstance(slot, EmaOptions)
        }
        for name in PRESETS
    }
    assert ladders == {
        "conservative": {1: ((1, 3, 7), -0.25, 0), 8: ((1, 3), 0, 0), 32: ((1,), 0, 0)},
        "aggressive": {
            1: ((1, 3, 7), -0.25, 0),
            8: ((1, 3, 7), -0.25, 3.0),
            64: ((1, 3), -0.25, 1.67),
            128: ((1, 3), -0.25, 1.2),
        },
        "newest": {
            1: ((1, 3, 5, 7), -0.25, 0),
            8: ((0, 1, 3), 0, 0),
            32: ((0, 1), 0, 0),
            64: ((0,), 0, 0),
        },
    }


def test_sglang_s_file_means_ema_even_with_ladders_alone(tmp_path: Path) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps({"1": SLOT}))
    assert dict(AdaptiveConfig.parse(str(path)).slots) == {1: EmaOptions(candidate_steps=(1, 3))}


BAD: list[tuple[Any, str]] = [
    ({"8": True}, "adaptive.slot 8 = True"),
    ({"8": {"candidate_steps": []}}, "adaptive.slot 8.candidate_steps = []"),
    ({"8": {"candidate_steps": [1, True]}}, "adaptive.slot 8.candidate_steps"),
    ({"8": {"candidate_steps": [3, -1]}}, "-1 is no draft length"),
    ({"8": {"candidate_steps": [1.0]}}, "1.0 is no draft length"),
    ({"8": {"candidate_steps": 3}}, "adaptive.slot 8.candidate_steps = 3"),
    ({"strategy": "ema", "8": {}}, "adaptive.slot 8.candidate_steps is missing"),
    ({"8": {**SLOT, "ema_alpha": True}}, "adaptive.slot 8.ema_alpha = True"),
    ({"8": {**SLOT, "update_interval": 0}}, "adaptive.slot 8.update_interval = 0"),
    ({"8": {**SLOT, "warmup_batches": -1}}, "adaptive.slot 8.warmup_batches = -1"),
    ({"8": {**SLOT, "ceiling_coeff": float("inf")}}, "adaptive.slot 8.ceiling_coeff"),
    (
        {"8": {**SLOT, "ceiling_coef": 1.0}},
        "adaptive.slot 8.ceiling_coef = 1.0 is not a known option",
    ),
    (
        {"8": {**SLOT, "compat": True}, "strategy": "ema"},
        "adaptive.slot 8.compat = True is refused in a slot: this key holds for all slots",
    ),
    (
        {"8": {**SLOT, "probe_time_share": 1}, "strategy": "ema"},
        "adaptive.slot 8.probe_time_share = 1 is not a known option",
    ),
    ({"8": {**SLOT, "window_trials": 9.0}, "strategy": "ema"}, "adaptive.slot 8.window_trials"),
    ({"ema_alpha": 2, "8": SLOT}, "adaptive.ema_alpha = 2"),
    ({"ema_alfa": 0.2, "8": SLOT}, "adaptive.ema_alfa = 0.2"),
    ({"strateggy": "ema"}, "did you mean strategy?"),
    ({"compatt": True, "strategy": "ema", "8": SLOT}, "did you mean compat?"),
    ({"strategy": "ema"}, "no batch-size slot"),
    ({"strategy": "ema", "candidate_steps": []}, "candidate_steps = []"),
    ({"candidate_steps": [1], "8": SLOT}, "adaptive.candidate_steps = [1]"),
    ({"compat": 1, "strategy": "ema", "8": SLOT}, "adaptive.compat = 1"),
    ({"switch_margin": 0.1, "strategy": "ema", "8": SLOT}, "adaptive.switch_margin"),
    ({8: SLOT, "8": SLOT}, "slot 8 twice"),
    ({True: SLOT}, "the key True"),
    ({-8: SLOT}, "the key -8"),
    (True, "adaptive = True"),
    ("no/such/file.json", "no preset (conservative, aggressive, newest)"),
]


@pytest.mark.parametrize(("given", "named"), BAD)
def test_a_bad_configuration_is_refused_with_slot_and_key_named(given: Any, named: str) -> None:
    with pytest.raises(ValueError) as refusal:
        AdaptiveConfig.parse(given)
    assert named in str(refusal.value)


def test_all_mistakes_are_in_one_message() -> None:
    wrong = {"compat": 1, "context_buckets": [0], "window_trials": 3, "zzz": 1, "8": {}, "9": [1]}
    with pytest.raises(ValueError) as refusal:
        AdaptiveConfig.parse(wrong)
    lines = str(refusal.value).splitlines()
    assert [line.split(" = ")[0].removeprefix("adaptive.") for line in lines] == [
        "zzz",
        "compat",
        "context_buckets",
        "window_trials",
        "slot 8.candidate_steps is missing: every slot has its own list of draft lengths",
        "slot 9",
    ]


@pytest.mark.parametrize("strategy", ["ema", "cost_model"])
def test_a_key_like_no_other_is_answered_by_all_keys_that_the_strategy_has(strategy: str) -> None:
    with pytest.raises(ValueError) as refusal:
        AdaptiveConfig.parse({"strategy": strategy, "zzz": 1, "8": SLOT})
    options = EmaOptions if strategy == "ema" else CostModelOptions
    known = {"strategy", "compat", "context_buckets", *options.model_fields}
    assert str(refusal.value).partition("known: ")[2].split(", ") == sorted(known)


def test_a_slot_may_say_all_keys_of_its_strategy() -> None:
    for options in (EmaOptions(candidate_steps=(1, 3)), CostModelOptions(candidate_steps=(1, 3))):
        config = AdaptiveConfig.parse({8: options.model_dump()})
        assert config.slots == ((8, options),)


@pytest.mark.parametrize("options", [CostModelOptions, EmaOptions])
def test_the_page_names_every_key_with_its_default(
    options: type[CostModelOptions] | type[EmaOptions],
) -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in DOCUMENTED.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    documented = {row[0].strip("`"): row[1] for row in rows}
    for name, field in options.model_fields.items():
        assert name in documented
        if not field.is_required() and field.default is not None:
            assert float(documented[name]) == field.default


# `verify_budget`: the rows of a round, and what it is refused with.


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
