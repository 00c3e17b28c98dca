"""`/v1/completions` through the official `openai` client, over an LLM with known answers."""

from typing import Any, cast

import openai
import pytest

from tests.server.fake_llm import MODEL, STATS, FakeLLM, answer_text
from tests.server.http_answers import CHAT, FULL, Post, events_of
from tllm_spec.text.tokenizer import Tokenizer, bytes_of_token


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


# `/v1/chat/completions` through the official `openai` client, over an LLM with known answers.


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


def test_the_bytes_of_tokens_make_the_text(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character may be several tokens."""
    text = "日本 👩‍👧 é"
    monkeypatch.setattr(llm, "answer", lambda index: text)
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


# `echo`, `prompt_logprobs` and grammars that take long, over an LLM with known answers.


PROMPT = "naïve 😀 text"


def lm_eval_figures(choice: dict[str, Any], context_len: int) -> tuple[float, bool]:
    """What lm-eval's `local-completions` computes of an answer."""
    logprobs = choice["logprobs"]["token_logprobs"][context_len:-1]
    best = choice["logprobs"]["top_logprobs"][context_len:-1]
    is_greedy = all(own == max(top.values()) for own, top in zip(logprobs, best, strict=True))
    return sum(logprobs), is_greedy


def test_the_request_of_lm_evals_loglikelihood_is_answered(post: Post, llm: FakeLLM) -> None:
    prompts = [llm.tokenizer.encode(PROMPT), llm.tokenizer.encode("another text")]
    options = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = post("/v1/completions", prompt=prompts, **options).json()
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        length = len(prompt)
        lists = choice["logprobs"]
        assert {len(each) for each in lists.values()} == {length + 1}
        assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
        assert lm_eval_figures(choice, 1) == (sum(-i / 2 for i in range(1, length)), False)
        assert lm_eval_figures(choice, length) == (0, True)
        assert llm.tokenizer.decode(prompt) == choice["text"][: lists["text_offset"][-1]]


@pytest.mark.parametrize("stream", [False, True])
def test_the_echoed_text_is_the_prompt_and_the_output(client: openai.OpenAI, stream: bool) -> None:
    answer: Any = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=100, echo=True, logprobs=0, stream=stream
    )
    chunks = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(chunk.text for chunk in chunks) == PROMPT + answer_text(0)
    tokens = [token for chunk in chunks for token in chunk.logprobs.tokens]
    offsets = [offset for chunk in chunks for offset in chunk.logprobs.text_offset]
    assert len(tokens) == len(offsets) and offsets == sorted(offsets)
    assert len(PROMPT) in offsets


def test_echo_with_no_tokens_gives_the_prompt_alone(post: Post) -> None:
    for stream in (False, True):
        answer = post(
            "/v1/completions", prompt=PROMPT, max_tokens=0, echo=True, logprobs=1, stream=stream
        )
        assert answer.status_code == 200, answer.text
        answers = events_of(answer)[:-1] if stream else [answer.json()]
        assert "".join(each["choices"][0]["text"] for each in answers) == PROMPT
    assert post("/v1/completions", prompt=PROMPT, max_tokens=0).status_code == 400


def test_prompt_logprobs_have_vllms_form(post: Post, llm: FakeLLM) -> None:
    for path, own in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ):
        (choice,) = post(path, **own, prompt_logprobs=1).json()["choices"]
        first, *rest = choice["prompt_logprobs"]
        prompt = llm.prompts[-1]
        assert first is None and len(rest) == len(prompt) - 1
        for i, (token, entry) in enumerate(zip(prompt[1:], rest, strict=True), start=1):
            assert entry[str(token)]["logprob"] == -i / 2 and entry[str(token)]["rank"] == 1
        assert post(path, **own, prompt_logprobs=1, stream=True).status_code == 400


def test_an_answer_has_the_acceptance_in_the_form_that_aiperf_reads(
    client: openai.OpenAI, post: Post
) -> None:
    expected = {
        "mean_acceptance_length": 2.5,
        "draft_acceptance_rate": 0.75,
        "acceptance_histogram": [0, 1, 1],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 4,
        "num_spec_tokens": 2,
    }
    whole = post("/v1/completions", prompt="a").json()
    assert whole["metrics"]["speculative_decoding"] == expected
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events_of(post("/v1/completions", prompt="a", **options))
    assert done == "[DONE]" and not any("metrics" in chunk for chunk in chunks)
    assert last["choices"] == [] and last["metrics"]["speculative_decoding"] == expected
    assert "metrics" not in post("/v1/completions", prompt="a", n=2).json()
