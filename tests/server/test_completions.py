"""`/v1/completions` through the official `openai` client, over an LLM with known answers."""

from typing import Any

import openai
import pytest

from tests.server.fake_llm import MODEL, STATS, FakeLLM, answer_text
from tests.server.http_answers import CHAT, FULL, Post, events_of


def test_a_completion_has_text_finish_reason_usage_and_speculation_figures(
    client: openai.OpenAI,
) -> None:
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
def test_prompts_are_accepted_in_all_four_forms(
    client: openai.OpenAI, prompt: Any, num_prompts: int
) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, n=2, max_tokens=FULL)
    assert [choice.index for choice in answer.choices] == list(range(2 * num_prompts))
    assert [choice.text for choice in answer.choices] == [
        answer_text(0),
        answer_text(1),
    ] * num_prompts


def test_token_ids_reach_the_llm_unchanged(client: openai.OpenAI, llm: FakeLLM) -> None:
    client.completions.create(model=MODEL, prompt=[5, 6], max_tokens=1)
    assert llm.prompts[-1] == [5, 6]


def test_the_chunks_of_a_streamed_completion_join_to_the_whole_text(client: openai.OpenAI) -> None:
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


def test_a_stream_ends_with_usage_only_on_request(client: openai.OpenAI) -> None:
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


def test_a_stream_sends_whole_characters_and_one_finish_reason_for_each_choice(post: Post) -> None:
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


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_have_tokens_offsets_and_the_best_alternatives(
    post: Post, stream: bool
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_with_usage_the_other_chunks_have_null_as_at_openai(post: Post, path: str) -> None:
    asked = {"prompt": "a"} if path == "/v1/completions" else {"messages": CHAT}
    answer = post(path, stream=True, stream_options={"include_usage": True}, **asked)
    *chunks, last, done = events_of(answer)
    assert chunks and all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == [] and last["usage"] and done == "[DONE]"
    assert all("usage" not in chunk for chunk in events_of(post(path, stream=True, **asked))[:-1])


def test_each_chunk_has_the_usage_so_far_on_request(post: Post) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    *chunks, _ = events_of(
        post("/v1/completions", prompt="a", stream=True, max_tokens=5, stream_options=options)
    )
    numbers = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert numbers == sorted(numbers) and numbers[-1] == 5
