"""`speculative_config.adaptive` and the acceptance gate: how they are written, what is refused, and
what it becomes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tllm_spec.config.adaptive_config import (
    DEFAULT_STEPS,
    PRESETS,
    AdaptiveConfig,
    CostModelOptions,
    EmaOptions,
)
from tllm_spec.config.llm_args import LlmArgs
from tllm_spec.config.speculative_config import DecodingBaseConfig, NGramDecodingConfig
from tllm_spec.executor.speculative.draft_length.adaptive import AdaptiveController, controller_for
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound

OTHERS: list[dict[str, Any]] = [
    {"decoding_type": "NGram"},
    {"decoding_type": "User_Provided", "drafter": "some.module:Drafter"},
    {"decoding_type": "Draft_Target", "speculative_model": "some/model"},
    {
        "decoding_type": "Draft_Target",
        "speculative_model": "some/model",
        "draft_target_one_model": True,
    },
    {"decoding_type": "Eagle3", "speculative_model": "some/head"},
    {"decoding_type": "Eagle3", "speculative_model": "some/head", "eagle3_one_model": False},
]


def speculation(text: str, tmp_path: Path) -> DecodingBaseConfig:
    """text: YAML of the keys of speculative_config after decoding_type and max_draft_len."""
    path = tmp_path / "options.yaml"
    path.write_text("speculative_config:\n  decoding_type: NGram\n  max_draft_len: 7\n" + text)
    config = LlmArgs.from_yaml(path, model="m").speculative_config
    assert config is not None
    return config


def ladders(config: DecodingBaseConfig) -> dict[int, tuple[int, ...]]:
    assert config.adaptive is not None
    return {low: slot.candidate_steps for low, slot in config.adaptive.slots}


def test_yaml_takes_slots_by_integers_and_by_strings_of_digits(tmp_path: Path) -> None:
    text = (
        "  adaptive:\n    strategy: ema\n    1: {candidate_steps: [1, 3, 7]}\n"
        "    '8': {candidate_steps: [0, 1]}\n"
    )
    config = speculation(text, tmp_path)
    assert ladders(config) == {1: (1, 3, 7), 8: (0, 1)}
    controller = controller_for(config)
    assert (controller.tier_for(1), controller.tier_for(8)) == (3, 1)
    assert controller.tiers_at(9) == {0, 1}


@pytest.mark.parametrize("preset", PRESETS)
def test_yaml_takes_a_preset_by_its_name(tmp_path: Path, preset: str) -> None:
    assert speculation(f"  adaptive: {preset}\n", tmp_path).adaptive == AdaptiveConfig.parse(preset)


@pytest.mark.parametrize(
    ("preset", "longest", "expected"),
    [
        ("aggressive", 4, {1: (1, 3), 8: (1, 3), 64: (1, 3), 128: (1, 3)}),
        ("newest", 2, {1: (1,), 8: (0, 1), 32: (0, 1), 64: (0,)}),
        ("conservative", 9, {1: (1, 3, 7), 8: (1, 3), 32: (1,)}),
    ],
)
def test_a_preset_ends_at_max_draft_len(
    preset: str, longest: int, expected: dict[int, tuple[int, ...]]
) -> None:
    own = {"decoding_type": "NGram", "max_draft_len": longest, "adaptive": preset}
    config = LlmArgs.from_kwargs("m", speculative_config=own).speculative_config
    assert config is not None and config.adaptive is not None
    assert ladders(config) == expected
    slots = dict(AdaptiveConfig.parse(preset).slots)
    for low, slot in config.adaptive.slots:
        assert slot == slots[low].model_copy(update={"candidate_steps": expected[low]})


def test_yaml_takes_the_path_of_sglang_s_file(tmp_path: Path) -> None:
    file = tmp_path / "sglang.json"
    file.write_text(json.dumps({"ema_alpha": 0.5, "1": {"candidate_steps": [1, 3]}}))
    config = speculation(f"  adaptive: {file}\n", tmp_path)
    assert config.adaptive is not None
    assert dict(config.adaptive.slots) == {1: EmaOptions(candidate_steps=(1, 3), ema_alpha=0.5)}


@pytest.mark.parametrize(
    ("longest", "ladder"),
    [(7, DEFAULT_STEPS), (4, (0, 1, 2, 3, 4)), (1, (0, 1)), (9, (*DEFAULT_STEPS, 9))],
)
def test_the_default_ladder_ends_at_max_draft_len(longest: int, ladder: tuple[int, ...]) -> None:
    config = NGramDecodingConfig(max_draft_len=longest, adaptive={})
    assert ladders(config) == {1: ladder}
    assert config.adaptive is not None and isinstance(config.adaptive.slots[0][1], CostModelOptions)
    assert NGramDecodingConfig(max_draft_len=longest).adaptive is None


@pytest.mark.parametrize("adaptive", [{}, {"strategy": "ema", 1: {"candidate_steps": [1, 3]}}])
def test_context_buckets_hold_for_all_slots_of_either_strategy(adaptive: dict[Any, Any]) -> None:
    config = AdaptiveConfig.parse(adaptive | {"context_buckets": [4096, 16384]})
    assert config.context_buckets == (4096, 16384)
    assert AdaptiveConfig.parse(config.as_options()) == config
    slots = AdaptiveController.from_config(config).state()["slots"]
    assert list(slots) == ["1", "1@4096", "1@16384"]
    assert "context_buckets" not in AdaptiveConfig.parse(adaptive).as_options()


@pytest.mark.parametrize("own", OTHERS, ids=lambda own: own["decoding_type"])
def test_every_decoding_type_takes_it(own: dict[str, Any]) -> None:
    args = LlmArgs.from_kwargs("m", speculative_config=own | {"max_draft_len": 3, "adaptive": {}})
    assert args.speculative_config is not None
    controller = controller_for(args.speculative_config)
    assert controller.compares_times and controller.tiers == (0, 1, 2, 3)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"adaptive": {1: {"candidate_steps": [1, 9]}}}, ["9", "max_draft_len = 7"]),
    ({"adaptive": {"candidate_steps": [0, 8]}}, ["8", "max_draft_len = 7"]),
    (
        {"acceptance_rate_threshold": 0.5},
        ["acceptance_rate_threshold = 0.5", "acceptance_rate_window_size = None"],
    ),
    (
        {"acceptance_rate_window_size": 8},
        ["acceptance_rate_threshold = None", "acceptance_rate_window_size = 8"],
    ),
    (
        {"acceptance_rate_threshold": 1.5, "acceptance_rate_window_size": 8},
        ["acceptance_rate_threshold = 1.5"],
    ),
    (
        {"acceptance_rate_threshold": 0.5, "acceptance_rate_window_size": -1},
        ["acceptance_rate_window_size = -1"],
    ),
    (
        {"acceptance_length_threshold": 0.5},
        ["acceptance_length_threshold", "acceptance_rate_threshold"],
    ),
]


@pytest.mark.parametrize(("given", "named"), REFUSED)
def test_what_is_refused_is_named_with_its_key_and_its_numbers(
    given: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ValueError) as refusal:
        NGramDecodingConfig(**({"max_draft_len": 7} | given))
    for words in named:
        assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("adaptive", "sentence"),
    [
        (
            {"window_trails": 3},
            "adaptive.window_trails = 3 is not a known option; did you mean window_trials?",
        ),
        ({"window_trials": 0}, "adaptive.window_trials = 0: "),
        ({"probe_time_share": 2}, "adaptive.probe_time_share = 2: "),
        ({"strategy": "best"}, "adaptive.strategy = 'best' is refused"),
        ({"compat": True}, "adaptive.compat = True is refused"),
        ({"context_buckets": 4096}, "adaptive.context_buckets = 4096 is refused; accepted: "),
        ({"context_buckets": [8, 4]}, "adaptive.context_buckets = [8, 4] is refused"),
        ({"context_buckets": [0, 4]}, "adaptive.context_buckets = [0, 4] is refused"),
        (
            {8: {"candidate_steps": [1], "strategy": "cost_model"}},
            "adaptive.slot 8.strategy = 'cost_model' is refused in a slot",
        ),
        ({8: [1]}, "adaptive.slot 8 = [1] is no mapping"),
        ("quick", "adaptive = 'quick': it is no preset"),
        ([1, 3], "adaptive = [1, 3]: a mapping, a path, or one of"),
    ],
)
def test_a_mistake_begins_with_its_path_whichever_way_it_is_reached(
    adaptive: Any, sentence: str
) -> None:
    def refusal(given: object, take: Callable[[Any], object]) -> str:
        with pytest.raises(ValueError) as refused:
            take(given)
        return str(refused.value)

    own = {"decoding_type": "NGram", "max_draft_len": 7, "adaptive": adaptive}
    inside = refusal(own, lambda spec: LlmArgs.from_kwargs("m", speculative_config=spec))
    assert inside.startswith(f"speculative_config.{sentence}")
    for alone in (AdaptiveConfig.parse, AdaptiveController.from_config):
        assert refusal(adaptive, alone).startswith(sentence)


def test_a_gate_of_both_options_limits_the_draft_length() -> None:
    config = NGramDecodingConfig(
        max_draft_len=3, acceptance_rate_threshold=0.5, acceptance_rate_window_size=2
    )
    controller = controller_for(config)
    lengths = []
    for _ in range(3):
        lengths.append(controller.tier_for(1))
        controller.observe(ObservedRound(1, [1], lengths[-1]))
    assert lengths == [3, 3, 0] and controller.tiers_at(1) == {0, 3}


def test_keywords_take_a_mapping_an_object_and_a_preset() -> None:
    mapping = {"strategy": "ema", 1: {"candidate_steps": [1, 3]}}
    for adaptive in (mapping, AdaptiveConfig.parse(mapping)):
        own = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive": adaptive}
        config = LlmArgs.from_kwargs("m", speculative_config=own).speculative_config
        assert config is not None and config.adaptive == AdaptiveConfig.parse(mapping)
    with pytest.raises(ValueError, match="max_draft_len = 2"):
        NGramDecodingConfig(max_draft_len=2, adaptive=AdaptiveConfig.parse(mapping))


def test_the_yaml_file_is_laid_over_keywords_inside_adaptive_too(tmp_path: Path) -> None:
    path = tmp_path / "options.yaml"
    path.write_text("speculative_config: {adaptive: {window_trials: 64}}\n")
    own = {"decoding_type": "NGram", "max_draft_len": 5, "adaptive": {"candidate_steps": [0, 5]}}
    config = LlmArgs.from_yaml(path, model="m", speculative_config=own).speculative_config
    assert config is not None and config.adaptive is not None
    assert dict(config.adaptive.slots) == {
        1: CostModelOptions(candidate_steps=(0, 5), window_trials=64)
    }
    path.write_text("max_batch_size: 4\n")
    kept = LlmArgs.from_yaml(path, model="m", speculative_config=own).speculative_config
    assert kept is not None and ladders(kept) == {1: (0, 5)}


def test_an_object_survives_being_given_again() -> None:
    """A checked configuration is passed on as it is: by `LLM(...)` of one, and by pydantic's own
    copies."""
    config = NGramDecodingConfig(max_draft_len=5, adaptive={"candidate_steps": [0, 5]})
    args = LlmArgs.from_kwargs("m", speculative_config=config)
    assert args.speculative_config is config
    assert args.model_copy(update={"max_batch_size": 3}).speculative_config == config
