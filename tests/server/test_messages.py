"""Anthropic's Messages API: blocks, events and errors as they go over the wire."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic_core import from_json

from tests.server.agent_server import CALL, PARAMETERS, TEXT, agent_llm, agent_server, prompt_of
from tests.server.fake_llm import FAILING_PROMPT, MODEL, SLOW_PROMPT, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT, Post, events_of, named_events
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.protocol import ChatCompletionRequest

Json = dict[str, Any]
MESSAGES = "/v1/messages"
TOOLS = [{"name": "weather", "input_schema": PARAMETERS, "strict": True}]
BODY: Json = {"max_tokens": 1000, "messages": CHAT, "tools": TOOLS}
NAMES = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return agent_llm()


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    with agent_server(llm) as url:
        yield url


def built(found: list[Json]) -> Json:
    """The message that a stream's events build. Their order is checked."""
    start, ping, *inner, end, stop = found
    assert [each["type"] for each in (start, ping, end, stop)] == [
        *("message_start", "ping", "message_delta", "message_stop")
    ]
    message, partial, is_open = start["message"], "", False
    for each in inner:
        index = len(message["content"]) - (each["type"] != "content_block_start")
        assert each["index"] == index
        assert is_open == (each["type"] != "content_block_start")
        if each["type"] == "content_block_start":
            message["content"].append(dict(each["content_block"]))
            is_open, partial = True, ""
        elif each["type"] == "content_block_stop":
            is_open = False
            if message["content"][-1]["type"] == "tool_use":
                begun = from_json(partial or "{}", allow_partial="trailing-strings")
                message["content"][-1]["input"] = begun
        elif each["delta"]["type"] == "input_json_delta":
            partial += each["delta"]["partial_json"]
        else:
            name = NAMES[each["delta"]["type"]]
            message["content"][-1][name] += each["delta"][name]
    assert not is_open
    return {**message, **end["delta"], "usage": {**message["usage"], **end["usage"]}}


def without_ids(message: Json) -> Json:
    blocks = [{k: v for k, v in each.items() if k != "id"} for each in message["content"]]
    return {**message, "id": "", "content": blocks}


def ask(post: Post, llm: FakeLLM, text: str, **body: Any) -> Json:
    """The message, streamed or not."""
    llm.answer = lambda index: text
    llm.is_paced = bool(body.get("stream"))
    answer = post(MESSAGES, **{**BODY, **body})
    assert answer.status_code == 200, answer.text
    return built(named_events(answer)) if body.get("stream") else dict(answer.json())


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_has_thinking_text_and_calls_as_blocks(
    post: Post, llm: FakeLLM, stream: bool
) -> None:
    message = ask(post, llm, TEXT, stream=stream)
    thinking, text, *calls = message["content"]
    assert thinking.pop("signature")
    assert thinking == {"type": "thinking", "thinking": "hmm <b"}
    assert text == {"type": "text", "text": "Let me see."}
    assert [(each["type"], each["name"], each["input"]) for each in calls] == [
        ("tool_use", "weather", {"at": "Rome"})
    ] * 2
    assert len({each["id"] for each in calls}) == 2
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", MODEL)
    usage, prompt = message["usage"], len(llm.prompts[-1])
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt
    assert usage["cache_read_input_tokens"] == 1
    assert usage["output_tokens"] == len(llm.tokenizer.encode(TEXT))
    thought = llm.tokenizer.encode("hmm <b", add_special_tokens=False)
    assert usage["output_tokens_details"] == {"thinking_tokens": len(thought)}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("length", range(2, 93, 3))
def test_a_cut_answer_has_what_is_there_streamed_or_not(
    post: Post, llm: FakeLLM, length: int
) -> None:
    text = f"{TEXT} bye"
    assert len(llm.tokenizer.encode(text)) > length
    whole, streamed = (
        without_ids(ask(post, llm, text, max_tokens=length, stream=stream))
        for stream in (False, True)
    )
    assert whole == streamed and whole["stop_reason"] == "max_tokens"
    assert whole["content"], "the cut block is there"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("stop", "blocks"),
    [("m <", ["hm"]), ("see", ["hmm <b", "Let me "]), ("Rome", ["hmm <b", "Let me see.", ""])],
)
def test_a_stop_sequence_ends_reasoning_text_or_call(
    post: Post, llm: FakeLLM, stop: str, blocks: list[str], stream: bool
) -> None:
    """A call that it cuts is not said to be one: its arguments are not whole."""
    message = ask(post, llm, TEXT, stop_sequences=["never", stop], stream=stream)
    texts = [each.get("thinking", each.get("text", "")) for each in message["content"]]
    assert texts == blocks
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)


def test_text_after_a_call_stays_there(post: Post, llm: FakeLLM) -> None:
    for stream in (False, True):
        message = ask(post, llm, f"</think>a {CALL} b", stream=stream)
        assert [each.get("text") for each in message["content"]] == ["a", None, "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_back_with_its_result_in_a_second_turn(
    post: Post, llm: FakeLLM, stream: bool
) -> None:
    first = ask(post, llm, TEXT, stream=stream)
    uses = [each for each in first["content"] if each["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": use["id"], "content": content, "is_error": is_error}
        for use, content, is_error in zip(
            uses, ("warm", [{"type": "text", "text": "gone"}]), (False, True), strict=True
        )
    ]
    redacted = {"type": "redacted_thinking", "data": "x"}
    again = [
        *CHAT,
        {"role": "assistant", "content": [redacted, *first["content"]]},
        {"role": "user", "content": [*results, {"type": "text", "text": "and now?"}]},
    ]
    second = ask(post, llm, "ok</think>It is warm.", messages=again, stream=stream)
    assert second["content"][1:] == [{"type": "text", "text": "It is warm."}]
    assert second["stop_reason"] == "end_turn"
    assert prompt_of(llm) == (
        "Tweather;user:hello;"
        'assistant:Rhmm <b;Let me see.C{"at": "Rome"}C{"at": "Rome"};'
        "tool:warm;tool:Error: gone;user:and now?;"
    )


def test_system_blocks_and_inert_options_are_taken(url: str, llm: FakeLLM) -> None:
    llm.answer = lambda index: "</think>ok"
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = {
        **BODY,
        "model": MODEL,
        "system": [{"type": "text", "text": "a", **cached}, {"type": "text", "text": "b"}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **cached}]}],
        "tools": [{**TOOLS[0], "type": "custom", "description": "d", **cached}],
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "stop_sequences": ["x"],
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "low"},
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "a-2025,b"}
    answer = httpx.post(f"{url}{MESSAGES}?beta=true", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert prompt_of(llm) == "ETrue;Flow;Tweather;system:a\nb;user:hello;"
    params = llm.sampling[-1]
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 4)
    assert (params.max_tokens, params.stop) == (1000, ["x"])
    assert llm.callers[-1][0][1] == "", "metadata has no effect"


def test_a_limit_over_the_context_is_the_context(post: Post, llm: FakeLLM) -> None:
    ask(post, llm, "</think>a", max_tokens=10 * llm.max_seq_len)
    assert llm.sampling[-1].max_tokens == llm.max_seq_len


def test_disabled_thinking_reaches_the_template(post: Post, llm: FakeLLM) -> None:
    ask(post, llm, "</think>a", thinking={"type": "disabled"})
    assert prompt_of(llm).startswith("EFalse;Tweather")


@pytest.mark.skipif(
    "thinking_token_budget" not in ChatCompletionRequest.model_fields,
    reason="there is no thinking budget",
)
def test_the_budget_of_thinking_is_the_requests(post: Post, llm: FakeLLM) -> None:
    ask(post, llm, "</think>a", thinking={"type": "enabled", "budget_tokens": 7})
    assert getattr(llm.sampling[-1], "thinking_token_budget", None) == 7


def test_the_output_format_is_a_grammar(post: Post, llm: FakeLLM) -> None:
    form = {"type": "json_schema", "schema": PARAMETERS}
    ask(post, llm, '{"at": "b"}', output_config={"format": form}, tools=None)
    guided = llm.sampling[-1].guided_decoding
    assert guided is not None and json.loads(guided.source.text) == PARAMETERS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "any"}, '[{"name": "weather", "parameters": {"at": "Rome"}}]'),
        ({"type": "tool", "name": "weather"}, '{"at": "Rome"}'),
    ],
)
def test_a_choice_of_tools_is_that_of_a_chat(
    llm: FakeLLM, choice: Json, text: str, stream: bool
) -> None:
    with agent_server(llm, tool_call_parser=None, reasoning_parser=None) as url:
        post = partial(posted, url)
        message = ask(post, llm, text, tool_choice=choice, stream=stream)
    (call,) = message["content"]
    assert (call["name"], call["input"]) == ("weather", {"at": "Rome"})
    assert message["stop_reason"] == "tool_use"
    assert llm.sampling[-1].guided_decoding is not None


def posted(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json={"model": MODEL, **body})


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_use_there_is_one_call(post: Post, llm: FakeLLM, stream: bool) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = ask(post, llm, f"</think>{CALL}{CALL}", tool_choice=choice, stream=stream)
    assert [each["type"] for each in message["content"]] == ["tool_use"]


def test_no_tool_is_called_with_the_choice_none(post: Post, llm: FakeLLM) -> None:
    message = ask(post, llm, f"</think>{CALL}", tool_choice={"type": "none"})
    assert message["content"] == [{"type": "text", "text": CALL}]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    "arguments",
    ["[1]", '{"a": NaN}', '{"a": 1e999}', f'{{"a": {"9" * 5000}}}', '{"a": "\\ud800"}', "{a"],
)
def test_arguments_that_no_answer_can_repeat_are_a_text(
    post: Post, llm: FakeLLM, arguments: str
) -> None:
    call = json.dumps({"name": "weather", "arguments": arguments})
    message = ask(post, llm, f"</think><tool_call>{call}</tool_call>", max_tokens=9999)
    assert message["content"][0]["input"] == {"arguments": arguments}


@pytest.mark.parametrize(("length", "status"), [(128, 200), (129, 400)])
def test_a_tools_name_may_be_as_long_as_that_of_an_mcp_server(
    post: Post, llm: FakeLLM, length: int, status: int
) -> None:
    llm.answer = lambda index: "</think>a"
    tool = {**TOOLS[0], "name": f"mcp__{'a' * (length - 5)}"}
    assert post(MESSAGES, **{**BODY, "tools": [tool]}).status_code == status


def test_a_message_has_results_before_and_after_texts_in_their_order(
    post: Post, llm: FakeLLM
) -> None:
    result = {"type": "tool_result", "tool_use_id": "no call's"}
    texts = [{"type": "text", "text": each} for each in "abc"]
    content = [texts[0], result, {**result, "is_error": True, "content": "x"}, *texts[1:]]
    ask(post, llm, "</think>a", messages=[{"role": "user", "content": content}])
    assert prompt_of(llm) == "Tweather;user:a;tool:;tool:Error: x;user:b\nc;"


def test_an_empty_answer_has_an_empty_text(post: Post, llm: FakeLLM) -> None:
    for stream in (False, True):
        message = ask(post, llm, "</think>", stream=stream)
        assert message["content"] == [{"type": "text", "text": ""}]


def test_tokens_are_counted_without_an_answer(post: Post, llm: FakeLLM) -> None:
    ask(post, llm, "</think>a", system="be short")
    num_prompts = len(llm.prompts)
    body = {name: BODY[name] for name in ("messages", "tools")}
    answer = post(f"{MESSAGES}/count_tokens", **body, system="be short")
    assert answer.json() == {"input_tokens": len(llm.prompts[-1])}
    assert len(llm.prompts) == num_prompts


def user(*blocks: Json) -> Json:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


BAD: list[tuple[Json, str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": 0}, "max_tokens = 0"),
    ({"messages": []}, "messages"),
    ({"messages": [5]}, "messages.0 = 5"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.user.content = 5"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "'tool'"),
    (user({"type": "image", "source": {}}), "'image', 'source': {}}: only text is served"),
    (user({"type": "document", "source": {}}), "'document', 'source': {}}: only text is served"),
    (user({"type": []}), "{'type': []}: only text is served"),
    (user({"text": "a"}), "{'text': 'a'}: only text is served"),
    (user({"type": "text"}), "content.0.text.text is required"),
    (user({"type": "thinking", "thinking": "a"}), "of this role have the types text and tool_res"),
    (
        user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
        "tool_result.content = [{'type': 'image'}]: parts have the form",
    ),
    ({"messages": [*CHAT, {"role": "assistant", "content": "a"}]}, "is not continued"),
    ({"system": [{"type": "image"}]}, "system = [{'type': 'image'}]: parts"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
    ({"tools": [{"name": "f"}]}, "tools.0.input_schema is required"),
    ({"tools": [*TOOLS, *TOOLS]}, "same name"),
    ({"tools": [{**TOOLS[0], "name": f"f{i}"} for i in range(200)]}, "at most 128"),
    ({"tool_choice": {"type": "tool"}}, "the type tool needs a name"),
    ({"tool_choice": {"type": "tool", "name": "x"}}, "'x' is not one of the tools: weather"),
    ({"tool_choice": "auto"}, "tool_choice = 'auto'"),
    ({"thinking": {"type": "enabled"}}, "enabled needs budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "no other type takes it"),
    ({"output_config": {"format": {"type": "x"}}}, "output_config.format = "),
    ({"stop_sequences": ["a"] * 99}, "stop_sequences = "),
    ({"container": "a"}, "container = 'a' is refused"),
    ({"mcp_servers": [{}]}, "mcp_servers = [{}] is refused"),
    ({"what": 1}, "what = 1 is not a known option"),
    ({"store": True}, "nothing is stored"),
]


@pytest.mark.parametrize(("body", "sentence"), BAD)
def test_mistakes_are_answered_with_anthropics_error(post: Post, body: Json, sentence: str) -> None:
    answer = post(MESSAGES, **{**BODY, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json() == {
        "type": "error",
        "error": {
            "type": "invalid_request_error",
            "message": answer.json()["error"]["message"],
        },
    }
    assert sentence in answer.json()["error"]["message"], answer.text


def error_type(answer: httpx.Response) -> tuple[int, str]:
    found = answer.json()
    assert found["type"] == "error" and found["error"]["message"]
    return answer.status_code, found["error"]["type"]


def test_every_error_of_the_route_has_anthropics_form(url: str, llm: FakeLLM) -> None:
    path = f"{url}{MESSAGES}"
    body = {**BODY, "model": MODEL}
    assert error_type(httpx.get(path)) == (405, "invalid_request_error")
    assert error_type(httpx.post(f"{path}/batches", json=body)) == (404, "not_found_error")
    assert error_type(httpx.post(path, json={**body, "model": "x"})) == (404, "not_found_error")
    broken = httpx.post(path, content="{", headers={"Content-Type": "application/json"})
    assert error_type(broken) == (400, "invalid_request_error")
    llm.is_healthy = False
    try:
        assert error_type(httpx.post(path, json=body)) == (503, "overloaded_error")
    finally:
        llm.is_healthy = True
    other = httpx.post(f"{url}/v1/chat/completions", json={"model": "x", "messages": CHAT})
    assert "type" not in other.json(), "other routes have OpenAI's"


def test_the_limits_of_other_routes_hold(llm: FakeLLM) -> None:
    body = {**BODY, "model": MODEL}
    with agent_server(llm, max_body_bytes=3000, max_request_tokens=5) as url:
        path = f"{url}{MESSAGES}"
        refused = httpx.post(path, json=body)
        assert error_type(refused) == (400, "invalid_request_error")
        assert "5 tokens for one request" in refused.text
        large = httpx.post(path, json={**body, "system": "a" * 3000})
        assert error_type(large) == (413, "request_too_large")
    with agent_server(llm, max_queue_size=0) as url:
        llm.running |= set(range(10**6, 10**6 + 2 * llm.args.max_batch_size))
        try:
            full = httpx.post(f"{url}{MESSAGES}", json=body)
        finally:
            llm.running.clear()
        assert error_type(full) == (429, "rate_limit_error") and full.headers["Retry-After"]


def test_a_key_comes_as_x_api_key_or_as_a_bearer_token(llm: FakeLLM) -> None:
    llm.answer = lambda index: "</think>a"
    good = [{"x-api-key": "k"}, {"Authorization": "Bearer k"}]
    good.append({"Authorization": "Bearer none", "x-api-key": "k"})
    bad: list[dict[str, str]] = [{}, {"x-api-key": "j"}, {"Authorization": "Basic k"}]
    with agent_server(llm, api_key="k") as url:
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            body = {**BODY, "model": MODEL}
            if path != MESSAGES:
                del body["max_tokens"]
            for headers in good:
                assert httpx.post(f"{url}{path}", json=body, headers=headers).status_code == 200
            for headers in bad:
                answer = httpx.post(f"{url}{path}", json=body, headers=headers)
                assert error_type(answer) == (401, "authentication_error")


@pytest.mark.parametrize(
    ("prompt", "error"),
    [(FAILING_PROMPT, (500, "api_error")), (SLOW_PROMPT, (504, "timeout_error"))],
)
def test_a_request_that_fails_ends_its_stream_with_an_error_event(
    prompt: str, error: tuple[int, str]
) -> None:
    llm = FakeLLM()
    submit = llm.submit
    llm.submit = lambda inputs, *more: submit(prompt, *more)  # type: ignore[method-assign]  # its own
    timeout = 0.2 if prompt == SLOW_PROMPT else 300
    with hosted(llm, ServerOptions(shutdown_timeout=5, request_timeout=timeout)) as url:
        body = {"model": MODEL, "max_tokens": 5, "messages": CHAT}
        assert error_type(httpx.post(f"{url}{MESSAGES}", json=body)) == error
        *_, last = named_events(httpx.post(f"{url}{MESSAGES}", json={**body, "stream": True}))
    assert (last["type"], last["error"]["type"]) == ("error", error[1])


def test_chat_counts_the_tokens_of_its_reasoning(post: Post, llm: FakeLLM) -> None:
    thought = len(llm.tokenizer.encode("hmm <b", add_special_tokens=False))
    llm.answer = lambda index: TEXT
    body = {"messages": CHAT, "n": 2}
    usage = post("/v1/chat/completions", **body).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * thought}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last, _ = events_of(post("/v1/chat/completions", **body, **options))
    assert last["usage"] == usage


def test_the_official_client_reads_answers_and_errors(url: str, llm: FakeLLM) -> None:
    anthropic = pytest.importorskip("anthropic")
    llm.answer, llm.is_paced = lambda index: TEXT, True
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        with client.messages.stream(model=MODEL, **BODY) as stream:
            streamed = stream.get_final_message()
        whole = client.messages.create(model=MODEL, **BODY)
        first, second = without_ids(streamed.to_dict()), without_ids(whole.to_dict())
        for name in ("content", "stop_reason", "usage"):
            assert first[name] == second[name]
        with pytest.raises(anthropic.NotFoundError, match="is not served"):
            client.messages.create(**{**BODY, "model": "x"})


@pytest.mark.thinned(2)
@pytest.mark.parametrize("depth", [50, 150, 250, 350, 450])
def test_a_schema_may_be_nested_deeply_or_is_refused(url: str, depth: int) -> None:
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    body = {"model": MODEL, "max_tokens": 9, "messages": CHAT}
    for choice in ("none", "auto", "any"):
        tools = [{"name": "weather", "input_schema": schema}]
        given = {**body, "tools": tools, "tool_choice": {"type": choice}}
        answer = httpx.post(f"{url}{MESSAGES}", json=given)
        assert answer.status_code in (200, 400), answer.text
