"""How large answers may become, and that long bodies and answers keep no other client waiting."""

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest

from tests.server.fake_llm import MODEL, SLOW_PROMPT, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import Post, events_of, wait_for
from tllm_spec.server import answers as json_parts
from tllm_spec.server import bodies as strict_body
from tllm_spec.server.admission import LOGPROB_BYTES, Admission
from tllm_spec.server.answers import render
from tllm_spec.server.options import ServerOptions


def test_log_probabilities_of_a_prompt_are_sent_once_for_each_prompt(post: Post) -> None:
    body = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 2, "n": 3, "prompt_logprobs": 1}
    choices = post("/v1/completions", **body).json()["choices"]
    lengths = [len(each["prompt_logprobs"] or ()) for each in choices]
    assert lengths == [3, 0, 0, 2, 0, 0]
    assert all("prompt_logprobs" in each for each in choices)


@pytest.mark.parametrize("counts", [False, True])
def test_streamed_choices_of_one_echo_all_begin_with_the_prompts_log_probabilities(
    post: Post, counts: bool
) -> None:
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 3, "n": 2, "echo": True}
    body |= {"logprobs": 1, "temperature": 0}
    whole = post("/v1/completions", **body).json()["choices"]
    options = {"stream": True, "stream_options": {"continuous_usage_stats": counts}}
    chunks = events_of(post("/v1/completions", **body, **options))[:-1]
    for index, choice in enumerate(whole):
        own = [each["choices"][0] for each in chunks if each["choices"][0]["index"] == index]
        assert "".join(each["text"] for each in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            parts = [each["logprobs"][name] for each in own if each["logprobs"]]
            assert [value for part in parts for value in part] == values, name
        assert choice["logprobs"]["token_logprobs"][1] is not None
    assert all(bool(each.get("usage")) == counts for each in chunks)


LARGE: dict[str, Any] = {"prompt": [5] * 90, "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", LARGE | {"n": 128, "echo": True, "logprobs": 5}),
        ("completions", LARGE | {"prompt": [[5] * 90] * 600, "prompt_logprobs": 20}),
        ("completions", LARGE | {"prompt": ["a" * 90] * 600, "prompt_logprobs": 20}),
        ("completions", {"prompt": "a", "n": 128, "max_tokens": 90, "logprobs": 5}),
        ("completions", {"prompt": ["a" * 90] * 32, "n": 128, "max_tokens": 1, "echo": True}),
        ("chat/completions", {"n": 128, "max_tokens": 90, "logprobs": True, "top_logprobs": 20}),
    ],
)
def test_an_answer_that_may_be_too_large_is_refused_before_any_work(
    path: str, body: dict[str, Any]
) -> None:
    llm = FakeLLM()
    if path.startswith("chat"):
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    with hosted(llm, ServerOptions(max_answer_bytes=1 << 20, max_queue_size=5000)) as url:
        refusal = httpx.post(f"{url}/v1/{path}", json={"model": MODEL, **body})
    assert refusal.status_code == 400 and not llm.prompts
    assert "the answer may have" in refusal.json()["error"]["message"]


def test_an_answer_without_a_limit_of_its_own_ends_where_it_has_room() -> None:
    llm = FakeLLM()
    with hosted(llm, ServerOptions(max_answer_bytes=11_000)) as url:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}
        for more in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 4, "n": 2}):
            assert httpx.post(f"{url}/v1/chat/completions", json=chat | more).status_code == 200
    assert [params.max_tokens for params in llm.sampling] == [None, 110, 11]


def test_while_large_answers_are_being_made_another_one_is_told_to_come_again() -> None:
    llm = FakeLLM()
    max_bytes = 21 * LOGPROB_BYTES * len(SLOW_PROMPT) * 3 // 2
    options = ServerOptions(max_answer_bytes=max_bytes)
    with hosted(llm, options) as url:
        body = {"model": MODEL, "prompt": SLOW_PROMPT, "max_tokens": 1, "prompt_logprobs": 20}
        first = threading.Thread(
            target=lambda: httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        )
        first.start()
        wait_for(lambda: bool(llm.prompts))
        second = httpx.post(f"{url}/v1/completions", json=body)
        assert second.status_code == 503 and second.headers["retry-after"]
        llm.aborted.add(0)
        first.join()
        answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": "a"})
        assert answer.status_code == 200


def test_parts_of_an_answer_are_the_json_of_the_whole() -> None:
    answer = {
        "empty": [{}, [], None, {"a": []}],
        "deep": [{"b": [{"c": [{"d": [{"e": [{"f": [1, "\u00e4\u2028"]}]}]}]}]}],
        "numbers": [1, 2.5, None, True],
        "mixed": [None, {"1": {"logprob": -1.0}}],
        "text": 'a"b\\',
    }
    expected = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
    assert render(answer).decode() == expected
    with pytest.raises(ValueError):
        render({"a": float("nan")})


class Threads:
    """Names of the threads in which functions have run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._monkeypatch = monkeypatch

    def watch(self, module: Any, name: str) -> None:
        function = getattr(module, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            self.names.append(threading.current_thread().name)
            return function(*arguments, **more)

        self._monkeypatch.setattr(module, name, watched)


@pytest.mark.parametrize(
    "options",
    [
        {"user": "u" * 100_000},
        {"logit_bias": {str(i): 1 for i in range(20_000)}},
        {"no_option": "x" * 100_000},
        {"prompt": [5] * 40_000},
        {"metadata": {"a": int("9" * 70)}, "user": "u" * 100_000},
    ],
)
def test_a_long_body_is_parsed_and_checked_outside_of_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    threads = Threads(monkeypatch)
    threads.watch(strict_body, "_decoded")
    threads.watch(strict_body, "parsed_body")
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1, **options}
    short = httpx.post(f"{url}/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert short.status_code == 200
    in_loop, threads.names = set(threads.names), []
    long = httpx.post(f"{url}/v1/completions", json=body)
    assert long.status_code == (400 if "no_option" in options else 200), long.text
    assert threads.names and not set(threads.names) & in_loop


def test_mistakes_of_a_long_body_are_named_as_those_of_a_short_one(url: str) -> None:
    def refusal(**options: Any) -> Any:
        answer = httpx.post(f"{url}/v1/completions", json={"model": MODEL, **options})
        assert answer.status_code == 400
        return answer.json()["error"]

    for mistakes in ({"prompt": 5, "top_k": "x"}, {"prompt": "a", "no_option": 1}, {}):
        assert refusal(**mistakes, user="u" * 100_000) == refusal(**mistakes, user="u")
    headers = {"Content-Type": "application/json"}
    for text in ('{"a": 1, "a": 2', '["a"', '{"a": 1, "a": 2}', "[1]"):
        answers = [
            httpx.post(f"{url}/v1/completions", content=space + text, headers=headers)
            for space in ("", " " * 100_000)
        ]
        assert answers[0].status_code == answers[1].status_code == 400
        errors = [each.json()["error"]["message"] for each in answers]
        messages = [error.partition("at character")[0] for error in errors]
        assert messages[0] == messages[1]


def test_a_number_of_thousands_of_digits_is_refused(url: str) -> None:
    headers = {"Content-Type": "application/json"}
    content = '{"model": "m", "prompt": [%s]}' % ("9" * 4000)
    answer = httpx.post(f"{url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert "a number of 4000 digits" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": [5] * 90, "prompt_logprobs": 5}),
        ("completions", {"prompt": [5] * 90, "echo": True}),
        ("completions", {"prompt": [5] * 90, "echo": True, "logprobs": 5, "stream": True}),
        ("completions", {"prompt": ["a"] * 100, "logprobs": 5}),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "n": 100, "logprobs": True},
        ),
    ],
)
def test_a_large_answer_is_made_and_written_outside_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    llm = FakeLLM()
    llm.answer = lambda index: "a b c d e f g h i j k l m n o p q r s t u v w x y z"
    threads = Threads(monkeypatch)
    threads.watch(json_parts, "_parts")
    started: list[str] = []
    start = Admission.start

    async def noted(*arguments: Any, **more: Any) -> Any:
        started.append(threading.current_thread().name)
        assert asyncio.get_running_loop()
        return await start(*arguments, **more)

    monkeypatch.setattr(Admission, "start", noted)
    with hosted(llm) as url:
        answer = httpx.post(f"{url}/v1/{path}", json={"model": MODEL, "max_tokens": 30, **body})
    assert answer.status_code == 200, answer.text
    is_text = body.get("echo") and "logprobs" not in body
    assert (threads.names or is_text) and not set(threads.names) & set(started)
