"""OpenAI's `/v1/responses` with tools and reasoning, through the official client where it reads
what matters."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.agent_server import CALL, PARAMETERS, TEXT, agent_llm, agent_server, prompt_of
from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.http_answers import CHAT, Post, named_events
from tllm_spec.outputs import CompletionOutput
from tllm_spec.server.chat_answer import ParsedText
from tllm_spec.server.responses_api import ResponseAnswer, ResponsesRequest

Json = dict[str, Any]
PATH = "/v1/responses"
TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
ARGUMENTS = '{"at": "Rome"}'


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return agent_llm()


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    with agent_server(llm) as url:
        yield url


def ask(client: openai.OpenAI, llm: FakeLLM, text: str, *, stream: bool, **body: Any) -> Any:
    """The response; that of a stream is what its client builds of the events."""
    llm.answer, llm.is_paced = lambda index: text, stream
    body = {"model": MODEL, "input": "hello", "tools": TOOLS, **body}
    if not stream:
        return client.responses.create(**body)
    with client.responses.stream(**body) as events:
        return events.get_final_response()


def events(post: Post, llm: FakeLLM, text: str, **body: Any) -> list[Json]:
    llm.answer, llm.is_paced = lambda index: text, True
    answer = post(PATH, **{"input": "hello", "tools": TOOLS, "stream": True, **body})
    data = named_events(answer)
    assert [each["sequence_number"] for each in data] == list(range(len(data)))
    return data


def without_ids(response: Json) -> list[Json]:
    names = ("id", "call_id", "parsed", "parsed_arguments")
    plain = json.loads(json.dumps(response["output"]))
    for item in plain:
        for each in (item, *(item.get("content") or ())):
            for name in names:
                each.pop(name, None)
    return list(plain)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_has_reasoning_a_message_and_calls_as_items(
    client: openai.OpenAI, llm: FakeLLM, stream: bool
) -> None:
    answer = ask(client, llm, TEXT, stream=stream)
    reasoning, message, *calls = answer.output
    assert (reasoning.type, reasoning.summary) == ("reasoning", [])
    assert [each.text for each in reasoning.content] == ["hmm <b"]
    assert answer.output_text == message.content[0].text == "Let me see."
    assert [(each.type, each.name, each.arguments) for each in calls] == [
        ("function_call", "weather", ARGUMENTS)
    ] * 2
    assert len({each.call_id for each in calls}) == 2
    assert len({each.id for each in answer.output}) == 4
    assert {each.status for each in answer.output} == {answer.status} == {"completed"}
    thought = len(llm.tokenizer.encode("hmm <b", add_special_tokens=False))
    assert answer.usage.output_tokens_details.reasoning_tokens == thought
    assert answer.tools[0].name == "weather" and answer.tool_choice == "auto"


def test_the_events_come_in_openais_order(post: Post, llm: FakeLLM) -> None:
    found = events(post, llm, f"hmm</think>ok {CALL}{CALL}")
    kinds = [each["type"].removeprefix("response.") for each in found]
    once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    parts = [
        *("output_item.added", "content_part.added"),
        *("{}.delta", "{}.done"),
        *("content_part.done", "output_item.done"),
    ]
    assert once == [
        *("created", "in_progress"),
        *(each.format("reasoning_text") for each in parts),
        *(each.format("output_text") for each in parts),
        *(*call, *call, "completed"),
    ]
    for each in found:
        if "item" in each:
            number, item = each["output_index"], each["item"]
        elif "item_id" in each:
            assert (each["output_index"], each["item_id"]) == (number, item["id"])
    done = [each for each in found if each["type"] == "response.function_call_arguments.done"]
    assert [(each["name"], each["arguments"]) for each in done] == [("weather", ARGUMENTS)] * 2
    assert kinds.count("function_call_arguments.delta") > 4, "arguments come as they are made"
    items = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert items == found[-1]["response"]["output"]


@pytest.mark.thinned(4)
@pytest.mark.parametrize("length", range(2, 93, 5))
def test_a_cut_response_has_what_is_there_streamed_or_not(
    post: Post, llm: FakeLLM, length: int
) -> None:
    text = f"{TEXT} bye"
    streamed = events(post, llm, text, max_output_tokens=length)[-1]
    assert streamed["type"] == "response.incomplete"
    body: Json = {"input": "hello", "tools": TOOLS, "max_output_tokens": length}
    whole = post(PATH, **body).json()
    assert without_ids(whole) == without_ids(streamed["response"])
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    *others, last = whole["output"]
    assert last["status"] == "incomplete"
    assert {each["status"] for each in others} <= {"completed"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_comes_back_with_its_output_in_a_second_turn(
    client: openai.OpenAI, llm: FakeLLM, stream: bool
) -> None:
    first = ask(client, llm, TEXT, stream=stream)
    calls = [each for each in first.output if each.type == "function_call"]
    outputs = ["warm", [{"type": "input_text", "text": "cold"}]]
    again = [
        {"role": "user", "content": "hello"},
        *(each.to_dict() for each in first.output),
        *(
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in zip(calls, outputs, strict=True)
        ),
    ]
    for each in again:
        each.pop("parsed_arguments", None)  # the client's own
    second = ask(client, llm, "ok</think>It is warm.", stream=stream, input=again)
    assert second.output_text == "It is warm."
    assert prompt_of(llm) == (
        "Tweather;user:hello;"
        'assistant:Rhmm <b;Let me see.C{"at": "Rome"}C{"at": "Rome"};'
        "tool:warm;tool:cold;"
    )


def test_items_of_one_answer_are_one_message_and_those_of_others_are_not(
    post: Post, llm: FakeLLM
) -> None:
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}
    summary = {**reasoning, "summary": [{"type": "summary_text", "text": "s"}]}
    said = [{"role": "assistant", "content": text} for text in "xyz"]
    result = {"type": "function_call_output", "call_id": "a", "output": "o"}
    items = [said[0], said[1], summary, call, said[2], result, reasoning]
    assert post(PATH, input=items).status_code == 200
    assert prompt_of(llm) == "assistant:x;assistant:y;assistant:Rs;zC{};tool:o;assistant:;"


JSON_CALLS = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", JSON_CALLS),
        ({"type": "function", "name": "weather"}, ARGUMENTS),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
            JSON_CALLS,
        ),
    ],
)
def test_a_choice_of_tools_is_that_of_a_chat(
    llm: FakeLLM, choice: Any, text: str, stream: bool
) -> None:
    with (
        agent_server(llm, tool_call_parser=None, reasoning_parser=None) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = ask(client, llm, text, stream=stream, tool_choice=choice)
    (call,) = answer.output
    assert (call.name, call.arguments) == ("weather", ARGUMENTS)
    assert llm.sampling[-1].guided_decoding is not None
    assert answer.to_dict()["tool_choice"] == choice


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_there_is_one(
    client: openai.OpenAI, llm: FakeLLM, stream: bool
) -> None:
    text = f"</think>{CALL}{CALL}"
    answer = ask(client, llm, text, stream=stream, parallel_tool_calls=False)
    assert [each.type for each in answer.output] == ["function_call"]
    assert answer.parallel_tool_calls is False


def test_effort_reaches_the_template_and_inert_options_are_taken(post: Post, llm: FakeLLM) -> None:
    llm.answer = lambda index: "</think>a"
    inert = {"include": ["reasoning.encrypted_content"], "store": False}
    for effort, shown in (("low", "ETrue;Flow;"), ("none", "EFalse;Fnone;"), (None, "")):
        reasoning = {"effort": effort, "summary": "auto"}
        answer = post(PATH, input="hello", reasoning=reasoning, **inert)
        assert answer.status_code == 200, answer.text
        assert answer.json()["reasoning"]["effort"] == effort
        assert prompt_of(llm) == f"{shown}user:hello;"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is stored"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type = 'web_search': must be"),
        ({"tools": [{"type": "function"}]}, "tools.0.name is required"),
        ({"tools": [*TOOLS, *TOOLS]}, "same name"),
        ({"tools": TOOLS * 200}, "at most 128"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "'x' is not one"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "web_search"}},
            "tool_choice.type = 'web",
        ),
        ({"tool_choice": "required"}, "tool_choice = ... needs tools"),
        ({"input": [{"type": "function_call"}]}, "input.0.function_call.call_id is required"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "output is required"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, "summary_text"),
        ({"input": [{"type": ["x"]}]}, "input.0 = {'type': ['x']}: messages"),
        ({"include": ["message.output_text.logprobs"]}, "include = "),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort = 'much'"),
        ({"reasoning": "low"}, "reasoning = 'low': an object is needed"),
    ],
)
def test_mistakes_are_answered_with_400(post: Post, body: Json, sentence: str) -> None:
    answer = post(PATH, **{"input": "hello", **body})
    assert answer.status_code == 400 and sentence in answer.json()["error"]["message"], answer.text


def test_tools_without_a_parser_are_refused_before_the_request_starts(llm: FakeLLM) -> None:
    with agent_server(llm, tool_call_parser=None) as url:
        num_prompts = len(llm.prompts)
        for path, body in (
            (PATH, {"input": "a", "tools": TOOLS}),
            (
                "/v1/messages",
                {
                    "messages": [{"role": "user", "content": "a"}],
                    "max_tokens": 5,
                    "tools": [{"name": "weather", "input_schema": PARAMETERS}],
                },
            ),
        ):
            answer = httpx.post(f"{url}{path}", json={"model": MODEL, **body})
            assert answer.status_code == 400 and "--tool_call_parser" in answer.text
        assert len(llm.prompts) == num_prompts


def test_white_space_between_blocks_is_no_block_and_at_a_texts_beginning_stays() -> None:
    fed = [
        [("reasoning_content", "r"), ("content", "\n")],
        [("content", "\n"), ("call", "f"), ("arguments", "{}"), ("content", " ")],
        [("content", "a ")],
        [("call", "g"), ("arguments", "{}"), ("content", "\n")],
    ]
    parser = type("", (), {"feed": lambda self, text: fed.pop(0), "finish": lambda self: []})()
    body, output = ResponsesRequest(model=MODEL, input="a"), CompletionOutput(0)
    answer = ResponseAnswer(body, FakeLLM().tokenizer, ParsedText(parser, is_parallel=True))
    steps = [step for _ in range(3) for step in answer.read(output)]
    output.finish_reason = "stop"
    steps += answer.read(output)
    texts = [(block.kind, block.text) for block in answer.blocks]
    assert texts == [
        *(("reasoning_content", "r"), ("call", "{}")),
        *(("content", " a "), ("call", "{}")),
    ]
    order = [(kind, block.index) for kind, block, _ in steps if kind != "grow"]
    assert order == [(kind, i) for i in range(4) for kind in ("open", "close")]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_long_reasoning_is_counted_in_a_thread(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """Others' streams go on."""
    monkeypatch.setattr("tllm_spec.server.blocks.LONG_BODY", 5)
    monkeypatch.setattr("tllm_spec.server.chat_answer.LONG_BODY", 5)
    threads, encode = [], llm.tokenizer.encode

    def encoded(text: str, **options: Any) -> list[int]:
        if text == "hmm <b":
            threads.append(threading.current_thread().name)
        return list(encode(text, **options))

    monkeypatch.setattr(llm.tokenizer, "encode", encoded)
    llm.answer = lambda index: TEXT
    body: Json = {"stream": stream, "tools": TOOLS if path == PATH else None}
    if path == PATH:
        body["input"] = "hello"
    else:
        body["messages"] = CHAT
        body["stream_options"] = {"include_usage": True} if stream else None
    answer = post(path, **body)
    assert '"reasoning_tokens":' in answer.text
    assert [name.partition(" ")[0] for name in threads] == ["AnyIO"]
