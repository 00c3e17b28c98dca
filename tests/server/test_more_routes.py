"""`/tokenize`, `/detokenize` and `/v1/responses`."""

import json
import math
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import MODEL, FakeLLM, answer_text
from tests.server.http_answers import CHAT, Post


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
        ("/v1/responses", {"input": []}, "at least one item"),
        ("/v1/responses", {"input": [5]}, "a text or a list of messages"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input_text"),
        ("/v1/responses", {"input": "a", "store": True}, "nothing is stored"),
        ("/v1/responses", {"input": "a", "cache_salt": ""}, "cache_salt = '': string should"),
        (
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": "msg_1"}, *CHAT]},
            "input.type = 'item_reference' is refused: nothing is stored",
        ),
        (
            "/v1/responses",
            {"input": [*CHAT, {"type": "function_call"}, {"type": "reasoning", "summary": []}]},
            "'function_call' is refused: use /v1/chat/completions for tools; accepted: 'message'\n"
            "input.type = 'reasoning' is refused: answers here have none",
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
