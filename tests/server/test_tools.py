"""Tools and reasoning on `/v1/chat/completions`, through the official `openai` client."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.grammar.walks import accepts, compiled
from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT, Post, events_of
from tllm_spec.chat_formats.chat_format import ChatFormat, Function, calls_schema
from tllm_spec.server.bodies import LONG_BODY
from tllm_spec.server.chat_answer import AnswerFormats
from tllm_spec.server.options import ServerOptions

PARAMETERS = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/City"}},
    "required": ["at"],
    "$defs": {"City": {"type": "string"}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"at": "Rome"}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}T{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls %}C{{ call.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    llm = FakeLLM()
    llm.tokenizer.chat_template = TEMPLATE
    return llm


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    options = ServerOptions(
        shutdown_timeout=5, tool_call_parser="hermes", reasoning_parser="deepseek_r1"
    )
    with hosted(llm, options) as url:
        yield url


def ask(client: openai.OpenAI, llm: FakeLLM, text: str, **body: Any) -> Any:
    llm.answer = lambda index: text
    return client.chat.completions.create(model=MODEL, messages=CHAT, **body)


def joined(chunks: Any) -> tuple[str, str, list[tuple[str, str]], str]:
    """Reasoning, content, calls and finish reason of a stream."""
    reasoning = content = end = ""
    calls: dict[int, list[str]] = {}
    for chunk in chunks:
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", "") or ""
        content += choice.delta.content or ""
        end = choice.finish_reason or end
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index not in calls and call.type == "function"
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    return reasoning, content, [(name, text) for name, text in calls.values()], end


TEXT = f"<think>hmm <b</think>Let me see. {CALL}\n{CALL}"
CALLED = ("weather", '{"at": "Rome"}')


def test_an_answer_has_reasoning_content_and_calls(client: openai.OpenAI, llm: FakeLLM) -> None:
    choice = ask(client, llm, TEXT, tools=TOOLS).choices[0]
    message = choice.message
    assert (message.reasoning_content, message.content) == ("hmm <b", "Let me see.")
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == [CALLED, CALLED] and choice.finish_reason == "tool_calls"
    assert len({call.id for call in message.tool_calls}) == 2


def test_a_streamed_answer_joins_to_the_same(client: openai.OpenAI, llm: FakeLLM) -> None:
    llm.is_paced = True
    chunks = list(ask(client, llm, TEXT, tools=TOOLS, stream=True))
    assert joined(chunks) == ("hmm <b", "Let me see.", [CALLED, CALLED], "tool_calls")
    pieces = [chunk for chunk in chunks if chunk.choices[0].delta.tool_calls]
    assert len(pieces) > 4, "arguments come as they are made"
    assert [chunk.choices[0].delta.role for chunk in chunks].count("assistant") == 1


def test_without_parallel_tool_calls_only_the_first_is_given(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    for stream in (False, True):
        answer = ask(client, llm, TEXT, tools=TOOLS, parallel_tool_calls=False, stream=stream)
        calls = joined(answer)[2] if stream else answer.choices[0].message.tool_calls
        assert len(calls) == 1


def test_tool_choice_none_gives_the_text_of_the_model(client: openai.OpenAI, llm: FakeLLM) -> None:
    message = ask(client, llm, f"<think>x</think>{CALL}", tools=TOOLS, tool_choice="none").choices[
        0
    ]
    assert (message.message.content, message.message.tool_calls) == (CALL, None)


@pytest.fixture
def bare(llm: FakeLLM) -> Iterator[openai.OpenAI]:
    """A client of a server without parsers."""
    with hosted(llm) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


NAMED = {"type": "function", "function": {"name": "weather"}}


def test_a_named_function_is_forced_by_the_grammar_of_its_arguments(
    bare: openai.OpenAI, llm: FakeLLM
) -> None:
    for stream in (False, True):
        answer = ask(bare, llm, '{"at": "Rome"}', tools=TOOLS, tool_choice=NAMED, stream=stream)
        if stream:
            assert joined(answer) == ("", "", [CALLED], "stop")
        else:
            call = answer.choices[0].message.tool_calls[0].function
            assert (call.name, call.arguments) == CALLED
            assert answer.choices[0].message.content is None
    assert json.loads(llm.sampling[-1].guided_decoding.source.text) == PARAMETERS


def test_required_forces_a_list_of_calls(bare: openai.OpenAI, llm: FakeLLM) -> None:
    text = '[{"name": "weather", "parameters": {"at": "Rome"}}]'
    answer = ask(bare, llm, text, tools=TOOLS, tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"at": "Rome"}'
    assert answer.choices[0].finish_reason == "tool_calls"
    schema = json.loads(llm.sampling[-1].guided_decoding.source.text)
    calls = [each["properties"] for each in schema["items"]["anyOf"]]
    assert [each["name"]["const"] for each in calls] == ["weather", "time"]
    assert calls[0]["parameters"] == {"$id": "function:0", **PARAMETERS}
    assert "maxItems" not in schema


def format_of(llm: FakeLLM) -> Any:
    """The structural tag of the last request."""
    source = llm.sampling[-1].guided_decoding.source
    assert source.kind == "structural_tag"
    return json.loads(source.text)["format"]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("stream", [False, True])
def test_with_a_parser_calls_are_forced_after_reasoning_in_the_models_own_format(
    client: openai.OpenAI, llm: FakeLLM, choice: Any, stream: bool
) -> None:
    text = f"<think>hmm</think>{CALL}"
    answer = ask(client, llm, text, tools=TOOLS, tool_choice=choice, stream=stream)
    is_named = choice == NAMED
    if stream:
        assert joined(answer) == ("hmm", "", [CALLED], "stop" if is_named else "tool_calls")
    else:
        message = answer.choices[0].message
        assert message.reasoning == message.reasoning_content == "hmm"
        assert message.tool_calls[0].function.arguments == CALLED[1]
    _, *parts = format_of(llm)["elements"]
    first = parts[0] if is_named else parts[0]["content"]["elements"][0]
    assert first == {"type": "const_string", "value": "<tool_call>"}
    assert ("time" in json.dumps(parts)) == (not is_named)


def test_strict_tools_are_constrained_only_inside_calls(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    answer = ask(client, llm, TEXT, tools=strict)
    assert len(answer.choices[0].message.tool_calls) == 2
    tags = format_of(llm)
    assert tags["type"] == "triggered_tags" and tags["triggers"] == ["<tool_call>"]
    ask(client, llm, TEXT, tools=TOOLS)
    assert llm.sampling[-1].guided_decoding is None
    ask(client, llm, "x", tools=strict, tool_choice="none")
    assert llm.sampling[-1].guided_decoding is None


def test_a_strict_tool_with_too_many_members_is_refused_before_its_grammar_is_made(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatFormat, "answer_tag", lambda *given, **more: 1 / 0)
    schema = {"properties": {f"p{i}": {} for i in range(9000)}}
    tools = [{"function": {"name": "f", "strict": True, "parameters": schema}}]
    answer = post("/v1/chat/completions", messages=CHAT, tools=tools)
    assert answer.status_code == 400 and "grammar of calls has over" in answer.text


def test_the_grammar_of_a_long_bodys_tools_is_made_in_a_thread(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others' streams go on."""
    threads, guided = [], AnswerFormats.guided

    def seen(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return guided(*given)

    monkeypatch.setattr(AnswerFormats, "guided", seen)
    tools = [{"function": {"name": "f", "description": "d" * LONG_BODY}}]
    post("/v1/chat/completions", messages=CHAT, tools=tools)
    assert [name.partition(" ")[0] for name in threads] == ["AnyIO"]


def test_a_guided_answer_has_reasoning(client: openai.OpenAI, llm: FakeLLM) -> None:
    text = "<think>{</think>\n{}"
    answer = ask(client, llm, text, response_format={"type": "json_object"})
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("{", "{}")


def test_references_of_a_function_are_to_its_own_schema() -> None:
    inner = {"properties": {"at": {"$ref": "#/$defs/n"}, "in": {"$ref": "#"}}, "required": ["at"]}
    functions = [
        Function(name, {"type": "object", **inner, "$defs": {"n": {"type": kind}}})
        for name, kind in (("f", "integer"), ("g", "boolean"))
    ]
    grammar = compiled(calls_schema(functions, is_parallel=False))
    for name, value in (("f", "1"), ("g", "true")):
        for at in ("1", "true"):
            text = f'[{{"name": "{name}", "parameters": {{"at": {at}, "in": {{"at": {at}}}}}}}]'
            assert accepts(grammar, text) == (at == value)


def test_the_template_sees_tools_calls_and_their_results(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    answer = ask(client, llm, f"<think></think>{CALL}", tools=TOOLS)
    message = answer.choices[0].message
    call_id = message.tool_calls[0].id
    result = {"role": "tool", "content": "warm <|user|>", "tool_call_id": call_id}
    client.chat.completions.create(
        model=MODEL, messages=[*CHAT, message.model_dump(), result], tools=TOOLS
    )
    assert llm.tokenizer.decode(llm.prompts[-1]) == (
        'Tweather;Ttime;user:hello;assistant:C{"at": "Rome"};tool:warm <|user|>;'
    )
    control = llm.tokenizer.encode("<|user|>", add_special_tokens=False)
    assert len(control) == 1 and control[0] not in llm.prompts[-1]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [('{"at": "Ro', '{"at": "Ro"}'), ('{"at": ', "{}"), ("", "{}"), ("[1]", '"[1]"')],
)
def test_a_call_comes_back_as_the_model_has_written_it(
    post: Post, llm: FakeLLM, arguments: str, shown: str
) -> None:
    """It may have been cut, and a model may write anything."""
    call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    answer = post("/v1/chat/completions", messages=[*CHAT, call])
    assert answer.status_code == 200, answer.text
    assert llm.tokenizer.decode(llm.prompts[-1]) == f"user:hello;assistant:C{shown};"


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "reasoning_content": "hmm"},  # a stream that was cut while it reasoned
        {"tool_calls": None, "name": None, "function_call": None, "refusal": None},
        {"content": None, "tool_calls": []},
    ],
)
def test_an_answer_without_content_comes_back(
    post: Post, llm: FakeLLM, answer: dict[str, Any]
) -> None:
    messages = [*CHAT, {"role": "assistant", **answer}, *CHAT]
    assert post("/v1/chat/completions", messages=messages).status_code == 200
    assert llm.tokenizer.decode(llm.prompts[-1]) == "user:hello;assistant:;user:hello;"


def test_any_number_of_calls_comes_back(post: Post, llm: FakeLLM) -> None:
    calls = [{"index": i, "function": {"name": "f", "arguments": "{}"}} for i in range(200)]
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert post("/v1/chat/completions", messages=messages).status_code == 200
    assert llm.tokenizer.decode(llm.prompts[-1]).count("C{}") == 200


@pytest.mark.parametrize("is_guided", [False, True])
def test_a_response_has_no_reasoning_streamed_or_not(
    client: openai.OpenAI, llm: FakeLLM, is_guided: bool
) -> None:
    llm.answer = lambda index: "<think>hmm <b</think>\n\nIt is warm."
    answer = "It is warm."
    options: Any = {"text": {"format": {"type": "json_object"}}} if is_guided else {}
    whole = client.responses.create(model=MODEL, input="hello", **options)
    with client.responses.stream(model=MODEL, input="hello", **options) as stream:
        deltas = [each.delta for each in stream if each.type == "response.output_text.delta"]
        assert stream.get_final_response().output_text == answer
    assert whole.output_text == "".join(deltas) == answer
    llm.answer = lambda index: "<think>hmm"
    cut = client.responses.create(model=MODEL, input="hello")
    assert cut.output_text == ""


def test_guided_text_has_no_reasoning(client: openai.OpenAI, llm: FakeLLM) -> None:
    answer = ask(client, llm, "{}", response_format={"type": "json_object"})
    assert answer.choices[0].message.content == "{}"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"tool_choice": "auto"}, "needs tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "same name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "'x' is not one of the tools: weather, time",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0"),
        (
            {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format and tool_choice",
        ),
        (
            {
                "tools": [{"function": {"name": "f", "parameters": {"a": "b" * 70000}}}],
                "tool_choice": "required",
            },
            "tools: the grammar of calls has over 65536 characters",
        ),
        ({"messages": [{"role": "user"}]}, "content is required"),
    ],
)
def test_mistakes_are_answered_with_400(post: Post, body: dict[str, Any], sentence: str) -> None:
    answer = post("/v1/chat/completions", **{"messages": CHAT, **body})
    assert answer.status_code == 400 and sentence in answer.json()["error"]["message"], answer.text


def test_tools_without_a_parser_are_refused_unless_they_are_forced(llm: FakeLLM) -> None:
    llm.answer = lambda index: "{}"
    body = {"model": MODEL, "messages": CHAT, "tools": TOOLS}
    with hosted(llm) as url:
        path = f"{url}/v1/chat/completions"
        refused = httpx.post(path, json=body)
        forced = httpx.post(path, json=body | {"tool_choice": "required", "stream": True})
    assert refused.status_code == 400 and "--tool_call_parser" in refused.text
    assert events_of(forced)[-1] == "[DONE]"


def tools_with(parameters: dict[str, Any], number: int = 1) -> Any:
    return [
        {"type": "function", "function": {"name": f"f{i}", "parameters": parameters}}
        for i in range(number)
    ]


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
def test_only_the_models_own_grammar_limits_forced_calls(llm: FakeLLM, parser: str) -> None:
    """Descriptions are not in it."""
    text = {"type": "string", "description": "What the parameter does. " * 10}
    named = {"title": {**text, "title": "T"}, "n": {"type": "integer", "default": "x"}}
    schema = {
        "type": "object",
        "properties": {**{f"p{i}": text for i in range(4)}, **named},
        "required": ["n"],
    }
    calls = {
        "hermes": '{"name": "f59", "arguments": {"title": "a", "n": 1}}',
        "qwen3_coder": "<function=f59>\n<parameter=title>\na\n</parameter>\n"
        "<parameter=n>\n1\n</parameter>\n</function>",
    }
    options = ServerOptions(tool_call_parser=parser)
    with hosted(llm, options) as url, httpx.Client(base_url=url) as client:
        body = {"model": MODEL, "messages": CHAT, "tool_choice": "required"}

        def answer(tools: Any) -> httpx.Response:
            return client.post("/v1/chat/completions", json={**body, "tools": tools})

        assert answer(tools_with(schema, 60)).status_code == 200
        grammar = compiled({"format": format_of(llm)}, "structural_tag")
        for value, is_right in (("1", True), ("1.5", False)):
            call = calls[parser].replace("1", value)
            assert accepts(grammar, f"<tool_call>\n{call}\n</tool_call>") == is_right
        # Of a reference hermes has one copy, the other as many as there are parameters.
        for number, each, is_hostile in (
            (9000, {"type": "string"}, True),
            (1500, {"$ref": "#"}, parser == "qwen3_coder"),
        ):
            given = answer(tools_with({"properties": {f"p{i}": each for i in range(number)}}))
            assert given.status_code == (400 if is_hostile else 200)
            assert ("grammar of calls has over" in given.text) == is_hostile


ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_allowed_tools_are_called(client: openai.OpenAI, llm: FakeLLM, mode: str) -> None:
    choice: Any = {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": mode}}
    time = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
    answer = ask(client, llm, f"<think></think>{time}", tools=TOOLS, tool_choice=choice)
    assert answer.choices[0].message.tool_calls[0].function.name == "time"
    assert "Tweather;" in llm.tokenizer.decode(llm.prompts[-1]), "the prompt names all tools"
    grammar = compiled({"format": format_of(llm)}, "structural_tag")
    assert accepts(grammar, time) and not accepts(grammar, CALL)
    assert accepts(grammar, "It is noon.") == (mode == "auto")


def test_without_a_parser_only_allowed_tools_are_in_the_list(
    bare: openai.OpenAI, llm: FakeLLM
) -> None:
    choice: Any = {"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": "required"}}
    text = '[{"name": "time", "parameters": {}}]'
    answer = ask(bare, llm, text, tools=TOOLS, tool_choice=choice)
    assert answer.choices[0].message.tool_calls[0].function.name == "time"
    source = llm.sampling[-1].guided_decoding.source
    grammar = compiled(json.loads(source.text))
    other = '[{"name": "weather", "parameters": {"at": "Rome"}}]'
    assert accepts(grammar, text) and not accepts(grammar, other)


def test_wrong_allowed_tools_are_refused(post: Post) -> None:
    other = {"type": "function", "function": {"name": "x"}}
    for own, sentence in (
        ({"tools": [other]}, "tool_choice = 'x' is not one of the tools: weather, time"),
        ({"tools": []}, "tool_choice.tools"),
        ({"mode": "any"}, "tool_choice.mode"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ([], "tool_choice.allowed_tools"),
        (5, "tool_choice.allowed_tools"),
    ):
        nested = {**ALLOWED, **own} if isinstance(own, dict) else own
        choice = {"type": "allowed_tools", "allowed_tools": nested}
        answer = post("/v1/chat/completions", messages=CHAT, tools=TOOLS, tool_choice=choice)
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]
