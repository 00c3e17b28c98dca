"""The HTTP server through the official `openai` client and plain HTTP, over an LLM with known
answers."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import FAILING_PROMPT, MODEL, SLOW_PROMPT, STATS, FakeLLM, answer_text
from tllm_spec import __version__
from tllm_spec.sampling_params import SamplingParams
from tllm_spec.server.app import LONG_BODY
from tllm_spec.server.streaming import updates

CHAT = [{"role": "user", "content": "hello"}]
FULL = 100  # tokens, more than any answer has


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within 5 s"
        time.sleep(0.005)


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each server-sent event; "[DONE]" as it is."""
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def test_a_completion_has_text_reason_usage_and_speculation_figures(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=FULL)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (answer_text(0), "stop")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert choice.model_extra is not None
    assert choice.model_extra["speculative_decoding"] == STATS.to_dict()


def test_a_completion_has_sixteen_tokens_by_default(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (16, "length")


@pytest.mark.parametrize(
    ("prompt", "num_prompts"), [("one", 1), (["one", "two"], 2), ([5, 6], 1), ([[5, 6], [7]], 2)]
)
def test_prompts_are_taken_in_all_four_forms(
    client: openai.OpenAI, prompt: Any, num_prompts: int
) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=FULL)
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    assert [choice.text for choice in answer.choices] == [
        answer_text(0),
        answer_text(1),
    ] * num_prompts


def test_token_ids_reach_the_llm_as_they_are(client: openai.OpenAI, llm: FakeLLM) -> None:
    client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=1)
    assert llm.prompts[-1] == [5, 6]


def test_a_streamed_completion_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    texts, reasons = ["", ""], []
    for chunk in client.completions.create(
        model=MODEL, prompt=["a"], n=2, stream=True, max_tokens=FULL
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons.append((choice.index, choice.finish_reason))
    assert texts == [answer_text(0), answer_text(1)]
    assert sorted(reasons) == [(0, "stop"), (1, "stop")]


def test_a_stream_ends_with_usage_only_when_asked(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model=MODEL, prompt=["a", "b"], stream=True, stream_options={"include_usage": True}
        )
    )
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 32
    plain = list(client.completions.create(model=MODEL, prompt="a", stream=True))
    assert all(chunk.usage is None for chunk in plain)


def test_a_stream_sends_whole_characters_and_one_ending_a_choice(
    post: Callable[..., httpx.Response],
) -> None:
    *chunks, done = events_of(post("/v1/completions", prompt="a", stream=True, max_tokens=FULL))
    assert done == "[DONE]"
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert any("😀" in text for text in texts) and not any("\ufffd" in text for text in texts)
    endings = [
        chunk["choices"][0]["speculative_decoding"]
        for chunk in chunks
        if chunk["choices"][0]["finish_reason"]
    ]
    assert endings == [STATS.to_dict()]


def test_a_chat_answer_is_a_message_of_the_assistant(client: openai.OpenAI, llm: FakeLLM) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}]
    )
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", answer_text(0))
    assert llm.tokenizer.decode(llm.prompts[-1]) == "<|begin|><|user|>hello<|assistant|>"
    assert llm.sampling[-1].max_tokens is None


def test_a_conversation_goes_on_with_the_clients_own_record_of_the_answer(
    client: openai.OpenAI, llm: FakeLLM
) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT)
    messages: Any = [
        *CHAT,
        answer.choices[0].message.model_dump(),
        {"role": "user", "content": "more"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages)
    turns = f"<|user|>hello<|assistant|>{answer_text(0)}<|endoftext|><|user|>more<|assistant|>"
    assert turns in llm.tokenizer.decode(llm.prompts[-1])


def test_message_fields_that_are_off_are_taken(post: Callable[..., httpx.Response]) -> None:
    message = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [],
        "annotations": [],
        "refusal": None,
    }
    assert post("/v1/chat/completions", messages=[*CHAT, message]).status_code == 200


def test_a_streamed_chat_joins_to_the_whole_one_and_names_its_role_once(
    client: openai.OpenAI,
) -> None:
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == answer_text(0)
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_tokens_offsets_and_the_best_alternatives(
    post: Callable[..., httpx.Response], stream: bool
) -> None:
    response = post("/v1/completions", prompt="a", logprobs=2, max_tokens=3, stream=stream)
    choices = (
        [event["choices"][0] for event in events_of(response)[:-1]]
        if stream
        else response.json()["choices"]
    )
    joined: dict[str, list[Any]] = {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }
    for choice in choices:
        for name, values in joined.items():
            values += choice["logprobs"][name]
    assert "".join(joined["tokens"]) == "".join(choice["text"] for choice in choices)
    assert joined["token_logprobs"] == [0.0] * 3
    assert [sorted(best.values()) for best in joined["top_logprobs"]] == [[-9999.0, 0.0]] * 3
    assert joined["text_offset"] == [sum(map(len, joined["tokens"][:i])) for i in range(3)]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_as_many_alternatives_as_asked(
    post: Callable[..., httpx.Response], stream: bool
) -> None:
    body = {
        "messages": CHAT,
        "logprobs": True,
        "top_logprobs": 1,
        "max_completion_tokens": 2,
        "stream": stream,
    }
    response = post("/v1/chat/completions", **body)
    choices = (
        [event["choices"][0] for event in events_of(response)[:-1]]
        if stream
        else response.json()["choices"]
    )
    tokens = [token for choice in choices for token in choice["logprobs"]["content"]]
    assert [bytes(token["bytes"]).decode() for token in tokens] == [
        token["token"] for token in tokens
    ]
    assert [len(token["top_logprobs"]) for token in tokens] == [1, 1]
    assert (
        "".join(token["token"] for token in tokens)
        == answer_text(0)[: len("".join(t["token"] for t in tokens))]
    )


def test_sampling_options_and_extensions_reach_the_llm(
    post: Callable[..., httpx.Response], llm: FakeLLM
) -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": ["x"],
        "logit_bias": {"12": -3},
        "presence_penalty": 1,
    }
    ours = {
        "top_k": 4,
        "min_p": 0.1,
        "ignore_eos": True,
        "min_tokens": 2,
        "speculation": {"max_draft_len": 2},
    }
    assert post("/v1/completions", prompt="a", **body, **ours).status_code == 200
    params = llm.sampling[-1]
    assert (params.temperature, params.top_p, params.seed, params.stop_strings) == (
        0.5,
        0.9,
        7,
        ("x",),
    )
    assert (params.logit_bias, params.presence_penalty, params.top_k, params.min_p) == (
        {12: -3},
        1,
        4,
        0.1,
    )
    assert (params.ignore_eos, params.min_tokens, params.speculation.max_draft_len) == (True, 2, 2)


def test_an_absent_temperature_is_openais_one_not_greedy(
    post: Callable[..., httpx.Response], llm: FakeLLM
) -> None:
    post("/v1/completions", prompt="a")
    assert (llm.sampling[-1].temperature, llm.sampling[-1].is_greedy) == (1.0, False)
    post("/v1/completions", prompt="a", temperature=0)
    assert llm.sampling[-1].is_greedy


def test_options_that_are_off_are_taken_whether_served_or_not(
    post: Callable[..., httpx.Response],
) -> None:
    off = {"response_format": {"type": "text"}, "use_beam_search": False, "length_penalty": None}
    neutral = {"length_penalty": 1.0, "early_stopping": False, "top_p_min": 0, "priority": 0}
    for options in (off, neutral):
        assert post("/v1/completions", prompt="a", guided_json=None, **options).status_code == 200


NULLABLE = (
    *(
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "seed",
        "stop",
    ),
    *("stream", "stream_options", "temperature", "top_p", "user"),
)
NULLABLE_IN_COMPLETIONS = ("best_of", "echo", "suffix", *NULLABLE)
NULLABLE_IN_CHAT = (
    *(
        "audio",
        "function_call",
        "functions",
        "max_completion_tokens",
        "metadata",
        "modalities",
        "moderation",
    ),
    *(
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
    ),
    *("response_format", "safety_identifier", "service_tier", "store", "tool_choice", "tools"),
    *(
        "top_logprobs",
        "verbosity",
        "web_search_options",
        "add_generation_prompt",
        "chat_template_kwargs",
    ),
    *NULLABLE,
)


def test_null_is_the_default_of_every_option(
    post: Callable[..., httpx.Response], llm: FakeLLM
) -> None:
    for path, names, needed in (
        ("/v1/completions", NULLABLE_IN_COMPLETIONS, {"prompt": "a"}),
        ("/v1/chat/completions", NULLABLE_IN_CHAT, {"messages": CHAT}),
    ):
        answers = [post(path, **needed, **options) for options in ({}, dict.fromkeys(names))]
        assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
        assert llm.sampling[-1] == llm.sampling[-2]
        assert llm.prompts[-1] == llm.prompts[-2]


def test_each_chunk_has_the_usage_so_far_when_asked(post: Callable[..., httpx.Response]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    *chunks, _ = events_of(
        post("/v1/completions", prompt="a", stream=True, max_tokens=5, stream_options=options)
    )
    numbers = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert numbers == sorted(numbers) and numbers[-1] == 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_long_intake_holds_up_neither_answers_nor_short_prompts(
    url: str,
    post: Callable[..., httpx.Response],
    llm: FakeLLM,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    begun, may_end, answers, text = threading.Event(), threading.Event(), [], "a" * (LONG_BODY + 1)

    def slow(given: Any, **options: Any) -> list[int]:
        if text in str(given):
            begun.set()
            assert may_end.wait(30)
        return [1]

    monkeypatch.setattr(llm.tokenizer, "encode", slow)
    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", slow)
    own = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    client = threading.Thread(
        target=lambda: answers.append(
            httpx.post(f"{url}{path}", json={"model": MODEL} | own, timeout=60)
        )
    )
    client.start()
    assert begun.wait(30)
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
    assert post("/v1/completions", prompt="short").status_code == 200
    assert post("/v1/chat/completions", messages=CHAT).status_code == 200
    monkeypatch.undo()
    may_end.set()
    client.join()
    assert answers[0].status_code == 200


def test_variables_reach_the_chat_template(
    post: Callable[..., httpx.Response], llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages[0].name }} says {{ word }}")
    messages = [{"role": "user", "content": "", "name": "Ann"}]
    post("/v1/chat/completions", messages=messages, chat_template_kwargs={"word": "hello"})
    assert llm.tokenizer.decode(llm.prompts[-1]) == "Ann says hello"


def test_a_chat_template_that_cannot_take_the_messages_is_a_bad_request(
    post: Callable[..., httpx.Response], llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    response = post("/v1/chat/completions", messages=CHAT)
    assert (response.status_code, "no system role" in response.text) == (400, True)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    assert post("/v1/chat/completions", messages=CHAT).status_code == 400


def test_when_one_prompt_is_refused_the_others_are_aborted(
    post: Callable[..., httpx.Response], llm: FakeLLM
) -> None:
    assert post("/v1/completions", prompt=["good", ""]).status_code == 400
    assert len(llm.prompts) - 1 in llm.aborted


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="other", prompt="a")
    assert refusal.value.code == "model_not_found"
    assert MODEL in refusal.value.message


def test_an_unknown_route_has_an_error_body_too(url: str) -> None:
    assert httpx.get(f"{url}/v2/nothing").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{url}/v1/completions").status_code == 405


def test_a_request_that_fails_in_the_engine_is_a_server_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not numbers"):
        client.completions.create(model=MODEL, prompt=FAILING_PROMPT)


def test_a_stream_that_fails_ends_with_an_error_event(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="not numbers"):
        list(client.completions.create(model=MODEL, prompt=FAILING_PROMPT, stream=True))


def test_a_client_that_stops_waiting_aborts_its_request(url: str, llm: FakeLLM) -> None:
    request_id = len(llm.prompts)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{url}/v1/completions", json={"model": MODEL, "prompt": SLOW_PROMPT}, timeout=0.1
        )
    wait_for(lambda: request_id in llm.aborted and request_id not in llm.running)


def test_a_client_that_leaves_a_stream_aborts_its_request(url: str, llm: FakeLLM) -> None:
    request_id = len(llm.prompts)
    body = {"model": MODEL, "prompt": SLOW_PROMPT, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert request_id in llm.running
    wait_for(lambda: request_id in llm.aborted and request_id not in llm.running)


def test_leaving_the_updates_between_two_of_them_aborts_all_requests() -> None:
    async def leave() -> set[int]:
        llm = FakeLLM()
        handles = [
            llm.generate_async(SLOW_PROMPT, SamplingParams(), streaming=True) for _ in range(3)
        ]
        async with aclosing(updates(handles)) as outputs:
            await anext(outputs)
        return llm.aborted

    assert asyncio.run(leave()) == {0, 1, 2}


def test_models_version_and_health(client: openai.OpenAI, url: str, llm: FakeLLM) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
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
