"""Bodies made to break the server: each is answered with a short 400."""

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake_llm import FakeLLM
from tests.server.http_answers import CHAT, Post
from tllm_spec.config import option_checks
from tllm_spec.server.bodies import parsed_body
from tllm_spec.server.protocol import CompletionRequest
from tllm_spec.server.refusals import RequestRefused


def message_of(response: httpx.Response) -> str:
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


@pytest.mark.parametrize(("number", "num_lines"), [(10, 10), (11, 11), (5000, 11)])
def test_at_most_ten_unknown_keys_are_listed(post: Post, number: int, num_lines: int) -> None:
    body = {f"k{i}": i for i in range(number)}
    lines = message_of(post("/v1/completions", prompt="a", **body)).splitlines()
    assert len(lines) == num_lines and lines[0].startswith("k0 = 0 is not a known option")
    if number > 10:
        assert lines[-1] == f"... and {number - 10} more unknown options"


def test_no_similar_names_are_searched_for_more_than_ten_unknown_keys(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []

    def search(word: str, *options: Any, **more: Any) -> list[str]:
        searched.append(word)
        return []

    monkeypatch.setattr(option_checks, "get_close_matches", search)
    message_of(post("/v1/completions", prompt="a", **{f"k{i}": i for i in range(11)}))
    assert not searched
    message_of(post("/v1/completions", prompt="a", **{f"k{i}": i for i in range(10)}))
    assert len(searched) == 10


def test_at_most_ten_mistakes_of_any_kind_are_listed(post: Post) -> None:
    names = "stream user n best_of temperature top_p seed min_p min_tokens ignore_eos top_k"
    wrong: dict[str, Any] = {name: {} for name in (*names.split(), "presence_penalty")}
    lines = message_of(post("/v1/completions", prompt="a", **wrong)).splitlines()
    assert len(lines) == 11 and lines[-1] == "... and 2 more mistakes"


def test_checking_messages_stops_at_the_first_wrong_one(post: Post) -> None:
    lines = message_of(post("/v1/chat/completions", messages=[{"rol": 1}] * 500)).splitlines()
    assert lines and all(line.startswith("messages.0.") for line in lines)


def test_a_long_unknown_key_is_shortened(post: Post) -> None:
    assert len(message_of(post("/v1/completions", prompt="a", **{"k" * 100_000: 1}))) < 3000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "self": 1}),
        ("/v1/completions", {"prompt": "a", "speculation": {"self": 1}}),
        ("/v1/completions", {"prompt": "a", "stream": True, "stream_options": {"self": 1}}),
        ("/v1/chat/completions", {"messages": CHAT, "self": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "self": 1}]}),
    ],
)
def test_a_key_named_self_is_an_unknown_option(post: Post, path: str, body: dict[str, Any]) -> None:
    assert "self = 1 is not a known option" in message_of(post(path, **body))


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{{ word | dictsort }}", 5),
        ("{{ '%(a)s' | format(**word) }}", {"b": 1}),
        ("{{ '%d' | format(word) }}", "x"),
        ("{{ word.items() }}", "text"),
        ("{{ word[0:'x'] }}", [1]),
    ],
)
def test_template_variables_of_the_wrong_type_are_a_bad_request(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, template: str, value: object
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    response = post("/v1/chat/completions", messages=CHAT, chat_template_kwargs={"word": value})
    assert "do not fit the model's chat template" in message_of(response)


def test_more_tokens_than_the_context_holds_are_refused(post: Post, llm: FakeLLM) -> None:
    assert "maximum context length" in message_of(
        post("/v1/completions", prompt="a", max_tokens=10**12)
    )
    assert post("/v1/completions", prompt="a", max_tokens=llm.max_seq_len).status_code == 200


def test_the_text_of_an_error_is_cut(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ raise_exception(messages[0].content * 10_000) }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    message = message_of(post("/v1/chat/completions", messages=CHAT * 10))
    assert len(message) < 10_000 and message.endswith("...")


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collector")
def test_the_error_of_a_long_body_does_not_keep_the_body(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Value(dict[str, Any]):
        """A dict that may have weak references."""

    value = Value()
    alive, bodies = weakref.ref(value), [{"prompt": "a", "unknown": value}]
    del value
    monkeypatch.setattr(json, "loads", lambda text, **options: bodies.pop())
    with pytest.raises(RequestRefused, match=r"unknown = \{\}"):
        parsed_body(lambda: bytearray(b"{}"), CompletionRequest)
    assert alive() is None
