"""Sampling parameters: ranges, what greedy means, and refusals of what is not served."""

import copy
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest

from tllm_spec.sampling_params import SamplingParams, SpeculationParams


def test_nothing_set_is_greedy() -> None:
    assert SamplingParams().is_greedy
    assert SamplingParams().effective_temperature == 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"top_k": 1},
        {"top_p": 0},
        {"min_p": 1, "temperature": 2.0},
    ],
)
def test_one_option_can_make_a_request_greedy(options: dict[str, float]) -> None:
    assert SamplingParams(**options).is_greedy
    assert SamplingParams(**options).effective_temperature == 0


@pytest.mark.parametrize(
    ("options", "temperature"),
    [
        ({"temperature": 0.8}, 0.8),
        ({"top_p": 0.9}, 1.0),
        ({"top_k": 50, "temperature": 2}, 2.0),
        ({"min_p": 0.1}, 1.0),
    ],
)
def test_an_unset_temperature_is_one_when_another_option_asks_for_sampling(
    options: dict[str, float], temperature: float
) -> None:
    assert not SamplingParams(**options).is_greedy
    assert SamplingParams(**options).effective_temperature == temperature


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 10**400},
        {"temperature": "1"},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": True},
        {"min_p": -0.5},
        {"seed": 2**63},
        {"max_tokens": 0},
        {"min_tokens": -1},
        {"n": 0},
        {"logprobs": -1},
        {"logprobs": "1"},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-320},
        {"repetition_penalty": 1e308},
        {"presence_penalty": float("inf")},
        {"presence_penalty": -1e308},
        {"frequency_penalty": 1e308},
        {"temperature": 1e39},
        {"stop": ""},
        {"stop": ["a", 3]},
        {"stop_token_ids": [-1]},
        {"bad_token_ids": [[1], []]},
        {"logit_bias": {"1": 2.0}},
        {"logit_bias": {1: float("nan")}},
        {"ignore_eos": 1},
        {"truncate_prompt_tokens": 0},
        {"use_beam_search": True},
        {"best_of": 2},
        {"logits_processor": 5},
        {"speculation": {"max_draft_len": -1}},
        {"speculation": {"draft_len": 1}},
        {"speculation": True},
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        SamplingParams.from_dict(options)


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens = 9 exceeds max_tokens = 8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=9, max_tokens=None).max_tokens is None


def test_a_single_word_is_the_same_as_a_list_of_one() -> None:
    params = SamplingParams(
        stop="end", bad=["x", "y"], bad_token_ids=[7, [8, 9]], logits_processor=print
    )
    assert params.stop_strings == ("end",)
    assert params.bad_strings == ("x", "y")
    assert params.bad_sequences == ((7,), (8, 9))
    assert params.logits_processors == (print,)
    assert (
        SamplingParams().stop_strings
        == SamplingParams().bad_sequences
        == SamplingParams().logits_processors
        == ()
    )


def test_true_and_false_are_one_and_no_log_probability() -> None:
    on, off = SamplingParams(logprobs=True), SamplingParams(logprobs=False)
    assert on == SamplingParams(logprobs=1) and type(on.logprobs) is int
    assert off == SamplingParams() and off.logprobs is None
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1


def test_all_options_that_are_refused_are_named_together() -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams.from_dict({"lookahead_config": 1, "use_beam_search": True, "topk": 2})
    keys = [line.partition(" = ")[0] for line in str(refusal.value).splitlines()]
    assert keys == ["lookahead_config", "use_beam_search", "topk"]


def test_wrong_values_are_named_together_with_the_options_that_are_refused() -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams.from_dict(
            {
                "temperature": -1,
                "top_p": 3,
                "n": 0,
                "max_tokens": 0,
                "stop": "",
                "stop_token_ids": [-1],
                "logit_bias": 5,
                "ignore_eos": 1,
                "speculation": {"enabled": 1},
                "use_beam_search": True,
            }
        )
    message = str(refusal.value)
    assert len(message.splitlines()) == 10
    for part in (
        *("temperature = -1", "top_p = 3", "n = 0", "max_tokens = 0", "stop = ''"),
        *("a token id of stop_token_ids = -1", "logit_bias = 5", "ignore_eos = 1"),
        *("speculation.enabled = 1", "use_beam_search = True"),
    ):
        assert re.search(rf"^{re.escape(part)}", message, re.M)
    with pytest.raises(ValueError) as refusal:
        SamplingParams(min_tokens=9, max_tokens=8, best_of=2)
    assert len(str(refusal.value).splitlines()) == 2


def test_null_means_the_default_as_in_http_bodies() -> None:
    assert (
        SamplingParams.from_dict({"n": None, "min_tokens": None, "speculation": None})
        == SamplingParams()
    )


def test_speculation_is_taken_as_a_mapping() -> None:
    params = SamplingParams.from_dict({"speculation": {"max_draft_len": 2, "enabled": False}})
    assert params.speculation == SpeculationParams(max_draft_len=2, enabled=False)


def test_defaults_of_other_engines_are_taken() -> None:
    defaults = {
        "length_penalty": 1.0,
        "early_stopping": False,
        "top_p_min": 0.0,
        "top_p_decay": 1.0,
    }
    runtime = {
        "length_penalty": 0.0,
        "early_stopping": 1,
        "top_p_min": 1e-6,
        "no_repeat_ngram_size": 1 << 30,
    }
    for options in (defaults, runtime):
        assert SamplingParams.from_dict(options) == SamplingParams()
    with pytest.raises(
        ValueError, match="early_stopping = True is refused: there is no beam search"
    ):
        SamplingParams.from_dict({"early_stopping": True})


def test_an_unknown_option_is_refused_with_similar_names() -> None:
    with pytest.raises(ValueError, match=r"temprature = 1 .* did you mean temperature"):
        SamplingParams.from_dict({"temprature": 1})


@pytest.mark.parametrize("name", ["bad_token_ids", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("value", [1, "abc", 1.5, [None], [[None]], object()])
def test_a_list_or_mapping_of_the_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_the_constructor_knows_tensorrt_llms_other_options_too() -> None:
    assert SamplingParams(return_perf_metrics=False, top_p_decay=None) == SamplingParams()  # type: ignore[call-arg] # as TensorRT-LLM's users write
    assert SamplingParams.from_dict({"return_perf_metrics": True}) == SamplingParams()
    with pytest.raises(ValueError, match=r"= 3 is refused: .*; accepted: None or True"):
        SamplingParams.from_dict({"return_perf_metrics": 3})
    with pytest.raises(ValueError, match=r"top_p_decay = 5 is refused: .*; accepted: None or 1\.0"):
        SamplingParams(top_p_decay=5)  # type: ignore[call-arg] # the same
    with pytest.raises(
        ValueError, match="temprature = 1 is not a known option; did you mean temperature"
    ):
        SamplingParams(temprature=1)  # type: ignore[call-arg] # a user's mistake


def test_more_samples_than_can_be_made_are_refused() -> None:
    with pytest.raises(ValueError, match="n = 10000000 is out of range: 1 to 16384 is accepted"):
        SamplingParams(n=10**7)


@pytest.mark.parametrize("options", [5, "abc", None, {1: 2}])
def test_parameters_that_are_not_a_mapping_are_refused(options: Any) -> None:
    with pytest.raises(
        ValueError, match=r"sampling_params = .*: SamplingParams or a mapping is needed"
    ):
        SamplingParams.from_dict(options)


def test_parameters_survive_pickling_copying_and_replacing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, speculation={"enabled": False})  # type: ignore[arg-type] # a mapping is taken
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == replace(params) == params
