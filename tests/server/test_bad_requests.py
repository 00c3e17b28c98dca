"""Bodies that cannot be served are answered with 400 and OpenAI's error object, whose message names
the field."""

import gc
import json
import weakref
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.http_answers import CHAT, Post
from tllm_spec.config import option_checks
from tllm_spec.server.bodies import parsed_body
from tllm_spec.server.protocol import CompletionRequest
from tllm_spec.server.refusals import RequestRefused

TEXT, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
RESPONSES, TOKENIZE = "/v1/responses", "/tokenize"
GOOD: dict[str, dict[str, Any]] = {TEXT: {"prompt": "a"}, CHAT_PATH: {"messages": CHAT}}
JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("path", "body", "param", "sentence"),
    [
        (TEXT, {"temprature": 1}, "temprature", "did you mean temperature"),
        (TEXT, {"temperature": -1}, "temperature", "0 to"),
        (TEXT, {"presence_penalty": -1e308}, "presence_penalty", "-1e+20 to 1e+20"),
        (TEXT, {"n": "2"}, "n", "integer"),
        (TEXT, {"suffix": "b"}, "suffix", "accepted: None or ''"),
        (TEXT, {"speculation": {"x": 1}}, "speculation.x", "max_draft_len"),
        (TEXT, {"stream_options": {}}, "stream_options", "stream = true"),
        (TEXT, {"prompt": [1, "a"]}, "prompt", "list of texts"),
        (TEXT, {"prompt": [[]]}, None, "empty"),
        (TEXT, {"stop": 5}, "stop", "a non-empty string or a list"),
        (TEXT, {"n": 10**7}, "n", "less than or equal to 128"),
        (TEXT, {"n": 0}, "n", "greater than or equal to 1"),
        (TEXT, {"stop": ["a"] * 65}, "stop", "at most 64 strings with 4096"),
        (TEXT, {"stop": "a" * 4097}, "stop", "at most 64 strings with 4096"),
        (CHAT_PATH, {"bad": ["a"] * 65}, "bad", "at most 64 strings with 4096"),
        (TEXT, {"bad_token_ids": [5] * 1025}, "bad_token_ids", "at most 1024 ids"),
        (TEXT, {"bad_token_ids": [[5, 6]] * 65}, "bad_token_ids", "1024 ids and 64 sequences"),
        (TEXT, {"stop_token_ids": [5] * 1025}, "stop_token_ids", "at most 1024"),
        (TEXT, {"logit_bias": {"x": 1}}, "logit_bias", "'x' is not a token id"),
        (TEXT, {"logit_bias": {"-1": 1}}, "logit_bias", "'-1' is not a token id"),
        (TEXT, {"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "has a token id twice"),
        (TEXT, {"prompt": ["a"] * 4097}, "prompt", "a body may ask for 4096"),
        (TEXT, {"prompt": [[1]] * 33, "n": 128}, "prompt", "33 prompts with 128 choices"),
        (TEXT, {"use_beam_search": True}, "use_beam_search", "no beam search"),
        (TEXT, {"length_penalty": 0.8}, "length_penalty", "accepted: None or 0.0 or"),
        (TEXT, {"guided_regex": ""}, "guided_regex", "non-empty"),
        (TEXT, {"thinking_token_budget": True}, "thinking_token_budget", "valid integer"),
        (TEXT, {"thinking_token_budget": 2.0}, "thinking_token_budget", "valid integer"),
        (CHAT_PATH, {"max_thinking_tokens": -2}, "thinking_token_budget", "at least -1"),
        (TEXT, {"guided_regex": "a", "guided_choice": ["b"]}, None, "one of them says"),
        (
            CHAT_PATH,
            {"response_format": {"type": "yaml"}},
            "response_format",
            "json_schema, structural_tag",
        ),
        (TEXT, {"priority": 1}, "priority", "accepted: None or 0"),
        (CHAT_PATH, {"messages": []}, "messages", "at least 1"),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            None,
            "only text",
        ),
        (CHAT_PATH, {"tools": [{}]}, None, "function is required"),
        (
            CHAT_PATH,
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            None,
            "messages.0.tool_calls.0.function is required",
        ),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages.0.content.text",
            "a valid string",
        ),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages.0.content.x",
            "not a known option; known: cache_control, text, type",
        ),
        (
            CHAT_PATH,
            {"messages": [{"role": "user", "content": "a", "type": "image"}]},
            "messages.0.type",
            "accepted: None or 'text'",
        ),
        (TEXT, {"logprobs_mode": "raw"}, "logprobs_mode", "'raw_logprobs', 'processed_logprobs'"),
        (CHAT_PATH, {"top_logprobs": 2}, "top_logprobs", "logprobs = true"),
    ],
)
def test_a_bad_request_is_answered_with_400_and_openais_error_object(
    post: Post, path: str, body: dict[str, Any], param: str | None, sentence: str
) -> None:
    response = post(path, **GOOD[path] | body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert sentence in error["message"]
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("completions", {}, "prompt is required"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages.0.content is required"),
        ("chat/completions", {"messages": [5]}, "messages.0 = 5: an object is needed"),
        (
            "chat/completions",
            {"messages": CHAT, "tool_choice": 5},
            "tool_choice = 5: none, auto, required or an object that names a function is needed",
        ),
        (
            "chat/completions",
            {"messages": CHAT, "tool_choice": {"function": {}}},
            "tool_choice.function.name is required",
        ),
        ("responses", {"input": [{"role": "user"}]}, "input.0.message.content is required"),
        ("responses", {"input": 5}, "input = 5: must be a valid list"),
    ],
)
def test_a_message_about_a_bad_request_has_no_names_of_classes(
    post: Post, path: str, body: dict[str, Any], message: str
) -> None:
    error = post(f"/v1/{path}", **body).json()["error"]
    assert (error["message"], error["param"]) == (message, message.split(" ")[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "é"}'.encode("latin-1"), "the body is not UTF-8"),
        (b"[" * 100_000, "the body is nested too deeply"),
        (
            "{",
            "the body is not JSON: Expecting property name enclosed in double quotes, "
            "at character 1",
        ),
        ('{"prompt": "a", "n": 1, "n": 2}', "the body has the key 'n' twice"),
        (
            r'{"prompt": "a", "user": {"\ud800": 1, "\ud800": 2}}',
            r"the body has the key '\ud800' twice",
        ),
        ("[]", "the body must be a JSON object, sent with Content-Type: application/json"),
        ("", "the body must be a JSON object, sent with Content-Type: application/json"),
    ],
)
def test_a_body_that_cannot_be_read_is_refused_with_the_reason(
    url: str, content: str | bytes, message: str
) -> None:
    response = httpx.post(f"{url}{TEXT}", content=content, headers=JSON)
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_an_error_message_that_quotes_a_lone_surrogate_can_be_sent(url: str) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a", "speculation": {"\ud800": 1}})
    response = httpx.post(f"{url}{TEXT}", content=body, headers=JSON)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith("speculation.?: character 0 is U+D800, one half of a surrogate pair")


def test_a_wrong_content_type_is_answered_with_the_right_one(url: str) -> None:
    response = httpx.post(f"{url}{TEXT}", content=json.dumps({"model": MODEL, "prompt": "a"}))
    assert response.status_code == 400
    assert "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["tokenize", "self", "conversations", "messages", "tokenizer_kwargs"]
)
def test_names_that_the_template_renderer_uses_are_refused_as_variables(
    post: Post, name: str
) -> None:
    response = post(CHAT_PATH, messages=CHAT, chat_template_kwargs={"word": 1, name: 1})
    assert response.status_code == 400
    assert (
        f"chat_template_kwargs = ['{name}'] are not variables"
        in response.json()["error"]["message"]
    )


DEEPER = "{% macro deeper(x) %}{{ deeper(x) }}{% endmacro %}{{ deeper(word) }}"


@pytest.mark.parametrize(
    "template", ["{{ word + 1 }}", "{{ 1 // (word | length) }}", "{{ word.a.b }}", DEEPER]
)
def test_variables_that_a_chat_template_cannot_use_are_a_bad_request(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    response = post(CHAT_PATH, messages=CHAT, chat_template_kwargs={"word": ""})
    assert (response.status_code, "chat template" in response.text) == (400, True)


HALF = "\ud800"
FUNCTION = {"type": "function", "function": {"name": HALF}}
BODIES: list[tuple[str, dict[str, Any], str]] = [
    (TEXT, {"prompt": HALF}, "prompt"),
    (TEXT, {"prompt": ["a", HALF]}, "prompt.1"),
    (TEXT, {"prompt": "a", "guided_regex": HALF}, "guided_regex"),
    (TEXT, {"prompt": "a", "guided_choice": [HALF]}, "guided_choice.0"),
    (TEXT, {"prompt": "a", "stop": HALF}, "stop"),
    (TEXT, {"prompt": "a", "cache_salt": HALF}, "cache_salt"),
    (TEXT, {"prompt": "a", "logit_bias": {HALF: 1}}, "logit_bias.?"),
    (TEXT, {"prompt": "a", "model": HALF}, "model"),
    (CHAT_PATH, {"messages": [{"role": "user", "content": HALF}]}, "messages.0.content"),
    (CHAT_PATH, {"messages": [{"role": "user", "content": "", "name": HALF}]}, "messages.0.name"),
    (CHAT_PATH, {"messages": CHAT, "chat_template_kwargs": {"a": HALF}}, "chat_template_kwargs.a"),
    (CHAT_PATH, {"messages": CHAT, "tools": [FUNCTION]}, "tools.0.function.name"),
    (RESPONSES, {"input": HALF}, "input"),
    (RESPONSES, {"input": "a", "instructions": HALF}, "instructions"),
    (TOKENIZE, {"prompt": HALF}, "prompt"),
    ("/detokenize", {"tokens": [1], "model": HALF}, "model"),
    *(
        (path, {name: HALF, **rest}, name)
        for path, rest in (
            (TEXT, {"prompt": "a"}),
            (CHAT_PATH, {"messages": CHAT}),
            (RESPONSES, {"input": "a"}),
        )
        for name in ("user", "safety_identifier")
    ),
]


@pytest.mark.parametrize(("path", "body", "name"), BODIES)
def test_half_a_character_in_any_string_is_a_bad_request(
    url: str, llm: FakeLLM, path: str, body: dict[str, Any], name: str
) -> None:
    num_before = len(llm.prompts)
    for text in (json.dumps({"model": MODEL} | body), json.dumps(body).replace("ud8", "uD8")):
        answer = httpx.post(f"{url}{path}", content=text, headers=JSON)
        assert answer.status_code == 400
        message, param = (answer.json()["error"][key] for key in ("message", "param"))
        assert param == (None if "?" in name else name)
        assert message.startswith(f"{name}: character 0 is U+D800, one half of a surrogate pair")
    assert len(llm.prompts) == num_before


def test_two_halves_are_a_character_and_bytes_of_a_half_are_not_utf8(url: str) -> None:
    for user, status in ((rb"\ud83d\ude00", 200), (rb"\\ud800", 200), (b"\xed\xa0\x80", 400)):
        body = b'{"model": "%b", "prompt": "a", "user": "%b"}' % (MODEL.encode(), user)
        answer = httpx.post(f"{url}{TEXT}", content=body, headers=JSON)
        assert answer.status_code == status, answer.text


def test_values_out_of_range_are_named_together_by_the_clients_names(post: Post) -> None:
    given = {"temperature": -1, "top_p": 3}
    many = {"top_k": -5, "min_p": 2, "min_tokens": -1, "seed": 1 << 70, "stop": "", "bad": ""}
    many |= {"repetition_penalty": 0, "truncate_prompt_tokens": 0, "presence_penalty": 1e30}
    many["frequency_penalty"] = -1e30
    for path, options, expected in (
        (TEXT, {"prompt": "a", "max_tokens": 0}, {"max_tokens", *given}),
        (RESPONSES, {"input": "a", "max_output_tokens": 0}, {"max_output_tokens", *given}),
        (TEXT, {"prompt": "a", **many}, None),
    ):
        response = post(path, **options, **given)
        assert response.status_code == 400
        lines = response.json()["error"]["message"].split("\n")
        if expected:
            assert {line.partition(" = ")[0] for line in lines} == expected
        else:
            assert len(lines) == 11 and lines[-1] == "... and 2 more mistakes"


# Bodies made to break the server: each is answered with a short 400.


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
