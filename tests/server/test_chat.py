"""`/v1/chat/completions` through the official `openai` client, over an LLM with known answers."""

from typing import Any, cast

import openai
import pytest

from tests.server.fake_llm import MODEL, FakeLLM, answer_text
from tests.server.http_answers import CHAT, Post, events_of
from tllm_spec.text.tokenizer import Tokenizer, bytes_of_token


def test_a_chat_answer_is_a_message_of_the_assistant(client: openai.OpenAI, llm: FakeLLM) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": parts}]
    )
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", answer_text(0))
    assert llm.tokenizer.decode(llm.prompts[-1]) == "<|begin|><|user|>hello<|assistant|>"
    assert llm.sampling[-1].max_tokens is None


def test_a_conversation_continues_with_the_message_object_of_the_openai_client(
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


def test_empty_message_fields_are_accepted(post: Post) -> None:
    message = {
        "role": "assistant",
        "content": "a",
        "tool_calls": [],
        "annotations": [],
        "refusal": None,
    }
    assert post("/v1/chat/completions", messages=[*CHAT, message]).status_code == 200


def test_the_chunks_of_a_streamed_chat_join_to_the_whole_text_and_have_the_role_once(
    client: openai.OpenAI,
) -> None:
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model=MODEL, messages=CHAT, stream=True)
    ]
    assert "".join(delta.content or "" for delta in deltas) == answer_text(0)
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_the_requested_number_of_alternatives(post: Post, stream: bool) -> None:
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


def test_the_bytes_of_tokens_make_the_text(post: Post, llm: FakeLLM) -> None:
    """A character may be several tokens."""
    text = "日本 👩‍👧 é"
    llm.answer = lambda index: text
    body = {"messages": CHAT, "logprobs": True, "top_logprobs": 1}
    answer = post("/v1/chat/completions", **body).json()["choices"][0]
    tokens = answer["logprobs"]["content"]
    assert len(tokens) > len(text)
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == text


@pytest.mark.parametrize(("name", "value"), [("<0xE6>", b"\xe6"), ("Ġæ", b" \xe6"), ("▁日", None)])
def test_a_tokens_bytes_are_known_by_its_name(name: str, value: bytes | None) -> None:
    class Named:
        def convert_ids_to_tokens(self, token_id: int) -> str:
            return name

    assert bytes_of_token(cast(Tokenizer, Named()), 5) == value


def test_parts_of_a_message_may_say_what_to_cache(post: Post, llm: FakeLLM) -> None:
    part = {"type": "text", "text": "hel", "cache_control": {"type": "ephemeral"}}
    parts = [part, {"type": "text", "text": "lo"}]
    message = {"role": "user", "content": parts, "type": "message"}
    assert post("/v1/chat/completions", messages=[message]).status_code == 200
    assert post("/v1/chat/completions", messages=CHAT).status_code == 200
    assert llm.prompts[-1] == llm.prompts[-2]


def test_variables_reach_the_chat_template(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ messages[0].name }} says {{ word }}")
    messages = [{"role": "user", "content": "", "name": "Ann"}]
    post("/v1/chat/completions", messages=messages, chat_template_kwargs={"word": "hello"})
    assert llm.tokenizer.decode(llm.prompts[-1]) == "Ann says hello"


def test_messages_that_the_chat_template_rejects_are_a_bad_request(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{{ raise_exception('no system role') }}")
    response = post("/v1/chat/completions", messages=CHAT)
    assert (response.status_code, "no system role" in response.text) == (400, True)
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    assert post("/v1/chat/completions", messages=CHAT).status_code == 400
