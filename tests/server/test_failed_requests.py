"""Requests that fail, are refused in part, or lose their client."""

import asyncio
import json
import socket
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import (
    FAILING_PROMPT,
    MAX_LEN,
    MODEL,
    SLOW_GRAMMAR_PROMPT,
    SLOW_PROMPT,
    FakeLLM,
)
from tests.server.http_answers import Post, wait_for
from tllm_spec.sampling_params import RequestOptions, SamplingParams
from tllm_spec.server.streaming import Running


def test_when_one_prompt_is_refused_the_others_are_aborted(post: Post, llm: FakeLLM) -> None:
    assert post("/v1/completions", prompt=["good", ""]).status_code == 400
    assert len(llm.prompts) - 1 in llm.aborted


def test_when_the_engine_ends_between_two_prompts_the_first_one_is_aborted(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = llm.submit

    def once(*inputs: Any, **options: Any) -> Any:
        monkeypatch.setattr(llm, "submit", ended)
        return generate(*inputs, **options)

    def ended(*inputs: Any, **options: Any) -> Any:
        raise RuntimeError("the engine's process has ended")

    monkeypatch.setattr(llm, "submit", once)
    assert post("/v1/completions", prompt=["good", "good"]).status_code == 503
    assert len(llm.prompts) - 1 in llm.aborted


def test_a_request_that_fails_in_the_engine_is_a_server_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not numbers"):
        client.completions.create(model=MODEL, prompt=FAILING_PROMPT)


def test_a_grammar_that_takes_too_long_is_the_requests_mistake(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the grammar takes too long"):
        client.completions.create(model=MODEL, prompt=SLOW_GRAMMAR_PROMPT)


def test_a_stream_that_fails_ends_with_an_error_event(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="not numbers"):
        list(client.completions.create(model=MODEL, prompt=FAILING_PROMPT, stream=True))


def test_a_client_that_disconnects_aborts_its_request(url: str, llm: FakeLLM) -> None:
    request_id = len(llm.prompts)
    address, body = httpx.URL(url), json.dumps({"model": MODEL, "prompt": SLOW_PROMPT})
    head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    with socket.create_connection((address.host, address.port or 80)) as connection:
        lines = (*head, f"Content-Length: {len(body)}", "", body)
        connection.sendall("\r\n".join(lines).encode())
        wait_for(lambda: request_id in llm.running)
    wait_for(lambda: request_id not in llm.running)
    assert request_id in llm.aborted


def test_a_client_that_closes_a_stream_aborts_its_request(url: str, llm: FakeLLM) -> None:
    request_id = len(llm.prompts)
    body = {"model": MODEL, "prompt": SLOW_PROMPT, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert request_id in llm.running
    wait_for(lambda: request_id in llm.aborted and request_id not in llm.running)


def test_closing_the_generator_of_updates_aborts_all_requests() -> None:
    async def leave() -> set[int]:
        llm = FakeLLM()
        options = RequestOptions(streaming=True)
        handles = [llm.submit(SLOW_PROMPT, SamplingParams(), options) for _ in range(3)]
        async with aclosing(Running(handles, 60).updates()) as outputs:
            await anext(outputs)
        return llm.aborted

    assert asyncio.run(leave()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * (MAX_LEN + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * MAX_LEN}]}),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_error_code(
    post: Post, path: str, body: dict[str, Any]
) -> None:
    response = post(path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in error["message"]
