"""Models, version, health and unknown routes."""

import json
import math
import threading
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import MAX_LEN, MODEL, FakeLLM, answer_text
from tests.server.http_answers import CHAT, SECONDS, Post
from tllm_spec import __version__
from tllm_spec.config.engine_config import NO_KV_EVENTS
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.admission import LONG_BODY
from tllm_spec.server.protocol import guided_params


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="other", prompt="a")
    assert refusal.value.code == "model_not_found"
    assert MODEL in refusal.value.message


def test_an_unknown_route_is_answered_with_openais_error_object(url: str) -> None:
    answer = httpx.get(f"{url}/v2/nothing?a=1")
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        {
            "message": "GET /v2/nothing is not served here; GET / says how to call this server, "
            "GET /openapi.json lists its routes",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        },
    )
    routes = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert httpx.get(f"{url}/").status_code == 200 and "/v1/completions" in routes


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [("POST", "/kv_cache_events", NO_KV_EVENTS), ("POST", "/v1/embeddings", "answers are text")],
)
def test_a_known_route_that_is_not_served_is_answered_with_the_reason(
    url: str, method: str, path: str, reason: str
) -> None:
    answer = httpx.request(method, f"{url}{path}", json={})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{method} {path} is not served here: {reason}; GET / says")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/fake", "GET"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_another_method_is_told_the_allowed_ones(
    url: str, method: str, path: str, allowed: str
) -> None:
    answer = httpx.request(method, f"{url}{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["message"] == f"{path} takes {allowed}, not {method}"


def test_a_slash_at_the_end_of_a_path_changes_nothing(url: str, post: Post) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/dashboard"):
        plain, slashed = (httpx.get(f"{url}{path}{end}") for end in ("", "/"))
        assert (slashed.status_code, slashed.content) == (200, plain.content)
    assert httpx.get(f"{url}/").status_code == 200
    assert post("/v1/completions/", prompt="a").status_code == 200


def test_models_version_and_health(client: openai.OpenAI, url: str, llm: FakeLLM) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, MAX_LEN + 1)
    with pytest.raises(openai.NotFoundError, match="the model is 'fake'"):
        client.models.retrieve("other")
    assert httpx.head(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/version").json() == {"version": __version__}
    assert httpx.get(f"{url}/health").status_code == 200
    llm.is_healthy = False
    try:
        assert httpx.get(f"{url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError) as refusal:
            client.completions.create(model=MODEL, prompt="a")
        assert refusal.value.status_code == 503
    finally:
        llm.is_healthy = True


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokenising_a_long_prompt_delays_no_other_request(
    url: str, post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, may_end, answers, text = threading.Event(), threading.Event(), [], "a" * (LONG_BODY + 1)

    def slow(given: Any, **options: Any) -> list[int]:
        if text in str(given):
            begun.set()
            assert may_end.wait(SECONDS)
        return [1]

    monkeypatch.setattr(llm.tokenizer, "encode", slow)
    own = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    client = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{url}{path}", json={"model": MODEL} | own, timeout=SECONDS)
        )
    )
    client.start()
    assert begun.wait(SECONDS)
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    assert post("/v1/completions", prompt="short").status_code == 200
    assert post("/v1/chat/completions", messages=CHAT).status_code == 200
    if "chat" in path:
        long = {"prompt": "b" * len(text), "truncate_prompt_tokens": 1}
        assert post("/v1/completions", **long).status_code == 200
    monkeypatch.undo()
    may_end.set()
    client.join()
    assert answers[0].status_code == 200


# `/tokenize`, `/detokenize` and `/v1/responses`.


def test_a_text_is_tokenised_and_back(post: Post, llm: FakeLLM) -> None:
    answer = post("/tokenize", prompt="naïve 😀", return_token_strs=True).json()
    assert answer["tokens"] == llm.tokenizer.encode("naïve 😀")
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == llm.max_seq_len
    back = post("/detokenize", tokens=answer["tokens"]).json()["prompt"]
    assert back.endswith("naïve 😀")


def test_a_conversation_is_tokenised_as_a_chat_request_does(post: Post, llm: FakeLLM) -> None:
    tokens = post("/tokenize", messages=CHAT).json()["tokens"]
    post("/v1/chat/completions", messages=CHAT)
    assert tokens == llm.prompts[-1]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a" * 3_000_000}, "maximum context length"),
        ("/detokenize", {"tokens": [10**9]}, "the vocabulary has"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0 = -1"),
        ("/v1/responses", {"input": []}, "at least 1 item"),
        ("/v1/responses", {"input": [5]}, "input.0 = 5: messages"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input_text"),
        ("/v1/responses", {"input": "a", "store": True}, "nothing is stored"),
        ("/v1/responses", {"input": "a", "cache_salt": ""}, "cache_salt = '': string should"),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "msg_1"}, *CHAT]},
            "input.0 = {'type': 'item_reference', 'id': 'msg_1'}: messages, reasoning, "
            "function_call and function_call_output are served, and nothing is stored: send",
        ),
        (
            "/v1/responses",
            {"input": [*CHAT, {"type": "web_search_call"}, {"type": "computer_call"}]},
            "input.1 = {'type': 'web_search_call'}: messages, reasoning, function_call and",
        ),
        ("/v1/responses", {"input": "a", "max_output_tokens": 0}, "max_output_tokens = 0"),
        ("/v1/responses", {"input": "a", "text": {"format": {"type": []}}}, "text.format = "),
        ("/v1/responses", {"input": "a", "metadata": {"a": math.nan}}, "cannot be written as JSON"),
        ("/v1/responses", {"input": "a", "metadata": {"a": [1e999]}}, "cannot be written as JSON"),
        ("/v1/responses", {"input": "a", "metadata": {"a": "\ud800"}}, "surrogate pair"),
        (
            "/v1/responses",
            {"input": "a", "text": {"format": {"type": "text", "name": "\ud800"}}},
            "surrogate pair",
        ),
    ],
)
def test_mistakes_are_answered_with_400(
    url: str, path: str, body: dict[str, Any], sentence: str
) -> None:
    text = json.dumps({"model": MODEL, **body})  # httpx itself would refuse NaN
    answer = httpx.post(f"{url}{path}", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and sentence in answer.json()["error"]["message"], answer.text


def test_a_response_is_the_answer_to_the_same_chat(client: openai.OpenAI, llm: FakeLLM) -> None:
    item: Any = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    answer = client.responses.create(model=MODEL, input=[item], instructions="be short")
    assert answer.output_text == answer_text(0) and answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    details = answer.usage.input_tokens_details.to_dict()
    assert details == {"cached_tokens": 1, "cache_write_tokens": 0}  # both are read by SDKs
    prompt = llm.prompts[-1]
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "be short"}, *CHAT]
    )
    assert llm.prompts[-1] == prompt
    cut = client.responses.create(model=MODEL, input="hello", max_output_tokens=2)
    assert cut.incomplete_details is not None
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_a_neutral_stream_option_of_a_response_is_accepted(post: Post) -> None:
    for options in (None, {}, {"include_obfuscation": False}):
        answer = post("/v1/responses", input="a", stream=True, stream_options=options)
        assert answer.status_code == 200, answer.text


def test_the_events_of_a_streamed_response_build_the_whole_one(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hello") as stream:  # checks their order
        events = list(stream)
        whole = stream.get_final_response()
    assert whole.output_text == answer_text(0)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # A busy front sends several tokens in an event.
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer_text(0)


def test_a_response_can_be_continued_with_its_own_items(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="hello")
    items: Any = [
        {"role": "user", "content": "hello"},
        *(item.to_dict() for item in first.output),
        {"role": "user", "content": "more"},
    ]
    assert client.responses.create(model=MODEL, input=items).output_text == answer_text(0)


def test_the_text_format_becomes_a_grammar(client: openai.OpenAI, llm: FakeLLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    options: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    client.responses.create(model=MODEL, input="hello", text=options)
    guided = llm.sampling[-1].guided_decoding
    assert guided is not None and '"a"' in guided.source.text


# How the options of a request body become sampling parameters.


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


# `response_format` and vLLM's names become the same grammars.


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"guided_json": SCHEMA}, "json_schema", '"a"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            "json_schema",
            '"a"',
        ),
        ({"response_format": {"type": "json", "schema": SCHEMA}}, "json_schema", '"a"'),
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"response_format": TAG}, "structural_tag", "any_text"),
        ({"response_format": {"type": "regex", "regex": "a+"}}, "regex", "a+"),
        ({"response_format": {"type": "ebnf", "ebnf": 'root ::= "a"'}}, "grammar", '"a"'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", '"a"'),
        ({"guided_choice": ["x", "y"]}, "choice", '["x", "y"]'),
        ({"structured_outputs": {"choice": ["x"]}}, "choice", '["x"]'),
    ],
)
def test_each_option_becomes_a_grammar(options: dict[str, Any], kind: str, text: str) -> None:
    params = guided_params(options)
    assert params is not None and params.source.kind == kind and text in params.source.text


def test_text_and_null_are_no_grammar() -> None:
    assert guided_params({"response_format": {"type": "text"}, "guided_json": None}) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "json_schema needs an object with a schema"),
        ({"response_format": {}}, "the types text, json_object"),
        ({"response_format": {"type": ["text"]}}, "the types text, json_object"),
        ({"response_format": {"type": {}}}, "the types text, json_object"),
        ({"tool_choice": {"a": "b" * 70000}}, r"tools = \[...\]: guided_decoding.json has 70009"),
        ({"guided_choice": []}, "guided_choice = .*a list of non-empty strings"),
        ({"structured_outputs": {}}, "structured_outputs = .*exactly one of"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        guided_params(options)
