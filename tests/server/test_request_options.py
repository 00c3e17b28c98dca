"""How the options of a request body become sampling parameters."""

from typing import Any

from tests.server.fake_llm import FakeLLM
from tests.server.http_answers import CHAT, Post
from tllm_spec.sampling_params import SamplingParams


def test_sampling_options_and_extensions_reach_the_llm(post: Post, llm: FakeLLM) -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "presence_penalty": 1,
    }
    ours: dict[str, Any] = {"top_k": 4, "min_p": 0.1, "ignore_eos": True, "min_tokens": 2}
    ours["speculation"] = {"max_draft_len": 2}
    body = given | ours | {"logit_bias": {"12": -3}, "max_tokens": 9}
    assert post("/v1/completions", prompt="a", **body).status_code == 200
    expected = SamplingParams(**given, **ours, logit_bias={12: -3}, max_tokens=9)
    assert llm.sampling[-1] == expected


def test_the_default_temperature_is_openais_1_and_not_greedy(post: Post, llm: FakeLLM) -> None:
    post("/v1/completions", prompt="a")
    assert (llm.sampling[-1].temperature, llm.sampling[-1].is_greedy) == (1.0, False)
    post("/v1/completions", prompt="a", temperature=0)
    assert llm.sampling[-1].is_greedy


def test_neutral_values_of_options_that_are_not_served_are_accepted(post: Post) -> None:
    off = {"response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": None}
    neutral = {"length_penalty": 1.0, "early_stopping": False, "top_p_min": 0, "priority": 0}
    for options in (off, neutral):
        assert post("/v1/completions", prompt="a", guided_json=None, **options).status_code == 200


def test_defaults_that_clients_of_vllm_and_sglang_write_out_are_accepted(post: Post) -> None:
    both = {"return_tokens_as_token_ids": False, "return_hidden_states": False, "bad_words": []}
    sglang = {"no_stop_trim": False, "separate_reasoning": True, "stream_reasoning": True}
    vllm = {"include_reasoning": True, "add_special_tokens": False, "mm_processor_kwargs": {}}
    vllm |= {"echo": False}
    answer = post("/v1/completions", prompt="a", **both, no_stop_trim=False)
    assert answer.status_code == 200, answer.text
    answer = post("/v1/chat/completions", messages=CHAT, **both, **sglang, **vllm)
    assert answer.status_code == 200, answer.text


def test_sglangs_and_tensorrt_llms_names_of_an_option_are_taken(post: Post, llm: FakeLLM) -> None:
    for theirs, ours in (
        ({"regex": "x"}, {"guided_regex": "x"}),
        ({"ebnf": 'root ::= "x"'}, {"guided_grammar": 'root ::= "x"'}),
        ({"json_schema": "{}"}, {"guided_json": "{}"}),
        ({"bad_words": ["x"]}, {"bad": ["x"]}),
        ({"no_stop_trim": True, "stop": "x"}, {"include_stop_str_in_output": True, "stop": "x"}),
    ):
        for options in (theirs, ours):
            answer = post("/v1/completions", prompt="a", seed=1, **options)
            assert answer.status_code == 200, answer.text
        assert llm.sampling[-1] == llm.sampling[-2] != llm.sampling[0]


NULLABLE = (
    "frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream "
    "stream_options temperature top_p user "
)
NULLABLE_IN_COMPLETIONS = f"{NULLABLE} best_of echo suffix"
NULLABLE_IN_CHAT = (
    f"{NULLABLE} audio function_call functions max_completion_tokens metadata modalities "
    "moderation parallel_tool_calls prediction prompt_cache_key prompt_cache_retention "
    "reasoning_effort response_format safety_identifier service_tier store tool_choice tools "
    "top_logprobs verbosity web_search_options add_generation_prompt chat_template_kwargs"
)


def test_metadata_changes_nothing(post: Post, llm: FakeLLM) -> None:
    for metadata in ({}, {"run": "7"}):
        answer = post("/v1/chat/completions", messages=CHAT, metadata=metadata)
        assert answer.status_code == 200, answer.text
    assert llm.sampling[-1] == llm.sampling[-2] and llm.prompts[-1] == llm.prompts[-2]
    refused = post("/v1/chat/completions", messages=CHAT, metadata=5)
    assert refused.json()["error"]["message"] == "metadata = 5: an object is needed"


def test_reasoning_effort_is_refused_with_the_form_that_is_served(post: Post) -> None:
    refused = post("/v1/chat/completions", messages=CHAT, reasoning_effort="low")
    message = refused.json()["error"]["message"]
    assert 'use chat_template_kwargs: {"reasoning_effort": "low"}' in message


def test_null_means_the_default_of_every_option(post: Post, llm: FakeLLM) -> None:
    for path, names, needed in (
        ("/v1/completions", NULLABLE_IN_COMPLETIONS, {"prompt": "a"}),
        ("/v1/chat/completions", NULLABLE_IN_CHAT, {"messages": CHAT}),
    ):
        answers = [
            post(path, **needed, **options) for options in ({}, dict.fromkeys(names.split()))
        ]
        assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
        assert llm.sampling[-1] == llm.sampling[-2]
        assert llm.prompts[-1] == llm.prompts[-2]


def test_null_for_an_unknown_name_is_ignored(post: Post) -> None:
    message = {"role": "user", "content": "hello", "reasoning_content": None}
    for path, own in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [message]}),
    ):
        assert post(path, **own, newest_option=None).status_code == 200
        assert post(path, **own, newest_option=0).status_code == 400


def test_top_k_of_minus_one_means_off(post: Post, llm: FakeLLM) -> None:
    assert post("/v1/completions", prompt="a", top_k=-1).status_code == 200
    assert llm.sampling[-1].top_k == 0
    assert post("/v1/completions", prompt="a", top_k=-2).status_code == 400
