"""A model whose markers are special tokens (Kimi's) over HTTP, with formats that `auto` finds."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import CHAT, Post
from tests.server.test_tools import CALLED, NAMED, TOOLS, format_of, joined
from tllm_spec.server.options import ServerOptions

BEGIN, END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
TURN = "<|im_start|>"
TEMPLATE = (
    "{% for tool in tools or [] %}T{{ tool.function.name }};{% endfor %}"
    f"{{% for message in messages %}}{TURN}{{{{ message.role }}}}:{{{{ message.content }}}}"
    "{{ message.reasoning_content }}{{ message.tool_call_id }}"
    f"{{% for call in message.tool_calls %}}{BEGIN}{{{{ call.id }}}}"
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN}assistant:"
    "{% if enable_thinking is false %}<think></think>{% elif opens or enable_thinking %}<think>"
    "{% endif %}{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}{% endif %}"
)
TEXT = f'I call{BEGIN}{CALL}functions.weather:3{ARGUMENTS}{{"at": "Rome"}}{CALL_END}{END}'
OPENS: Any = {"chat_template_kwargs": {"opens": True}}


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    llm = FakeLLM()
    special = [TURN, "<think>", "</think>", BEGIN, END, CALL, ARGUMENTS, CALL_END]
    llm.tokenizer.add_special_tokens({"additional_special_tokens": special})
    llm.tokenizer.chat_template = TEMPLATE
    return llm


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    options = ServerOptions(shutdown_timeout=5, tool_call_parser="auto", reasoning_parser="auto")
    with hosted(llm, options) as url:
        yield url


def ask(client: openai.OpenAI, llm: FakeLLM, text: str, **body: Any) -> Any:
    llm.answer = lambda index: text
    return client.chat.completions.create(**{"model": MODEL, "messages": CHAT} | body)


def test_a_call_ends_reasoning_that_the_prompt_has_opened(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    message = ask(client, llm, TEXT, tools=TOOLS, extra_body=OPENS).choices[0].message
    assert (message.reasoning, message.content) == ("I call", None)
    assert [call.id for call in message.tool_calls] == ["functions.weather:3"]
    assert message.tool_calls[0].function.arguments == CALLED[1]
    llm.is_paced = True
    found = joined(ask(client, llm, TEXT, tools=TOOLS, stream=True, extra_body=OPENS))
    llm.is_paced = False
    assert found == ("I call", "", [CALLED], "tool_calls")


def test_the_prompt_says_whether_an_answer_begins_inside_reasoning(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    text = "hmm</think>so"
    cases: list[tuple[Any, str | None, str]] = [
        ({}, None, text),
        (OPENS, "hmm", "so"),
        ({"enable_thinking": True}, "hmm", "so"),
        ({"enable_thinking": False}, None, text),
        ({"chat_template_kwargs": {"enable_thinking": False}}, None, text),
        ({"reasoning_effort": "none"}, None, text),
        ({"reasoning_effort": "high"}, "hmm", "so"),
    ]
    for body, reasoning, content in cases:
        message = ask(client, llm, text, extra_body=body).choices[0].message
        assert getattr(message, "reasoning_content", None) == reasoning, body
        assert message.content == content, body
    assert llm.tokenizer.decode(llm.prompts[-1]).endswith("assistant:<think>high")


def test_a_cut_answer_is_all_reasoning(client: openai.OpenAI, llm: FakeLLM) -> None:
    message = ask(client, llm, "hmm", extra_body=OPENS).choices[0].message
    assert (message.reasoning_content, message.content) == ("hmm", "")


def test_what_an_answer_has_comes_back_in_the_next_prompt(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    message = ask(client, llm, TEXT, tools=TOOLS, extra_body=OPENS).choices[0].message
    result = {"role": "tool", "content": "warm", "tool_call_id": message.tool_calls[0].id}
    ask(client, llm, "so", messages=[*CHAT, message.model_dump(), result], tools=TOOLS)
    prompt = llm.tokenizer.decode(llm.prompts[-1])
    assert f'I call{BEGIN}functions.weather:3{{"at": "Rome"}}' in prompt
    assert prompt.count("functions.weather:3") == 2
    ask(client, llm, "so", messages=[*CHAT, {"role": "assistant", "reasoning": "hmm"}])
    assert "hmm" in llm.tokenizer.decode(llm.prompts[-1])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_calls_are_forced_in_the_format_that_auto_found(
    client: openai.OpenAI, llm: FakeLLM, choice: Any
) -> None:
    answer = ask(client, llm, TEXT, tools=TOOLS, tool_choice=choice, extra_body=OPENS)
    assert answer.choices[0].message.tool_calls[0].function.arguments == CALLED[1]
    assert BEGIN in str(format_of(llm))


def test_two_values_of_a_variable_are_refused(post: Post) -> None:
    body = {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}
    answer = post("/v1/chat/completions", messages=CHAT, **body)
    assert answer.status_code == 400 and "enable_thinking = True" in answer.text


def test_what_cannot_be_a_tool_is_refused(post: Post) -> None:
    def tool(name: str, **own: Any) -> Any:
        return {"type": "function", "function": {"name": name, "strict": True, **own}}

    cases = [
        [tool(f"f{number}") for number in range(200)],
        [tool("f"), tool("f")],
    ]
    for tools in cases:
        answer = post("/v1/chat/completions", messages=CHAT, tools=tools)
        assert answer.status_code == 400 and "tools" in answer.text, answer.text
    schemas: list[Any] = [
        {"properties": {"a": 5}}, {"properties": 5}, {"$ref": "#"}, {"$ref": "#/nowhere"},
        {"required": 5}, {"properties": {'"<': {}}}, {"type": "string"}, {"anyOf": [5, {}]},
        {"properties": {"a": {"$ref": "#/properties/a"}}}, {"properties": {"a": {"enum": [5]}}},
    ]  # fmt: skip
    for schema in schemas:
        for choice in ("auto", "required"):
            tools = [tool("f", parameters=schema)]
            answer = post("/v1/chat/completions", messages=CHAT, tools=tools, tool_choice=choice)
            assert answer.status_code in (200, 400), answer.text
