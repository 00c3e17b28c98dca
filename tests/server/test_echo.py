"""`echo`, `prompt_logprobs` and grammars that take long, over an LLM with known answers."""

from typing import Any

import openai
import pytest

from tests.server.fake_llm import MODEL, FakeLLM, answer_text
from tests.server.http_answers import Post, events_of

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
