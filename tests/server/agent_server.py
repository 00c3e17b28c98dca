"""A server that parses reasoning and calls, over a fake LLM whose template shows all messages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.server.fake_llm import FakeLLM
from tests.server.hosted import hosted
from tllm_spec.server.options import ServerOptions

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"at": "Rome"}}\n</tool_call>'
# Reasoning, a text, two calls.
TEXT = f"hmm <b</think>Let me see. {CALL}\n{CALL}"
TEMPLATE = (
    "{% if enable_thinking is defined %}E{{ enable_thinking }};{% endif %}"
    "{% if reasoning_effort %}F{{ reasoning_effort }};{% endif %}"
    "{% for tool in tools or [] %}T{{ tool.function.name }};{% endfor %}"
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}R{{ message.reasoning_content }};{% endif %}"
    "{{ message.content }}"
    "{% for call in message.tool_calls %}C{{ call.function.arguments | tojson }}{% endfor %};"
    "{% endfor %}{% if add_generation_prompt %}<think>{% endif %}"
)


def agent_llm() -> FakeLLM:
    llm = FakeLLM()
    llm.tokenizer.chat_template = TEMPLATE
    return llm


@contextmanager
def agent_server(llm: FakeLLM, **options: Any) -> Iterator[str]:
    """Yields the server's address."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    with hosted(llm, ServerOptions(**{"shutdown_timeout": 5, **parsers, **options})) as url:
        yield url


def prompt_of(llm: FakeLLM) -> str:
    """The text of the latest prompt, without the reasoning's beginning."""
    return str(llm.tokenizer.decode(llm.prompts[-1])).removesuffix("<think>")
