"""Models, version, health and unknown routes."""

import threading
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import MAX_LEN, MODEL, FakeLLM
from tests.server.http_answers import CHAT, Post
from tllm_spec import __version__
from tllm_spec.config.engine_config import NO_KV_EVENTS
from tllm_spec.server.admission import LONG_BODY


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refusal:
        client.completions.create(model="other", prompt="a")
    assert refusal.value.code == "model_not_found"
    assert MODEL in refusal.value.message


def test_an_unknown_route_is_answered_with_openais_error_object(url: str) -> None:
    answer = httpx.get(f"{url}/v2/nothing?a=1")
    assert (answer.status_code, answer.json()["error"]) == (
        404,
        {
            "message": "GET /v2/nothing is not served here; GET / says how to call this server, "
            "GET /openapi.json lists its routes",
            "type": "invalid_request_error",
            "param": None,
            "code": None,
        },
    )
    routes = httpx.get(f"{url}/openapi.json").json()["paths"]
    assert httpx.get(f"{url}/").status_code == 200 and "/v1/completions" in routes


@pytest.mark.parametrize(
    ("method", "path", "reason"),
    [("POST", "/kv_cache_events", NO_KV_EVENTS), ("POST", "/v1/embeddings", "answers are text")],
)
def test_a_known_route_that_is_not_served_is_answered_with_the_reason(
    url: str, method: str, path: str, reason: str
) -> None:
    answer = httpx.request(method, f"{url}{path}", json={})
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message.startswith(f"{method} {path} is not served here: {reason}; GET / says")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/fake", "GET"),
        ("POST", "/health", "GET, HEAD"),
    ],
)
def test_another_method_is_told_the_allowed_ones(
    url: str, method: str, path: str, allowed: str
) -> None:
    answer = httpx.request(method, f"{url}{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["message"] == f"{path} takes {allowed}, not {method}"


def test_a_slash_at_the_end_of_a_path_changes_nothing(url: str, post: Post) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/dashboard"):
        plain, slashed = (httpx.get(f"{url}{path}{end}") for end in ("", "/"))
        assert (slashed.status_code, slashed.content) == (200, plain.content)
    assert httpx.get(f"{url}/").status_code == 200
    assert post("/v1/completions/", prompt="a").status_code == 200


def test_models_version_and_health(client: openai.OpenAI, url: str, llm: FakeLLM) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.model_dump()["max_model_len"]) == (MODEL, MAX_LEN + 1)
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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokenising_a_long_prompt_delays_no_other_request(
    url: str, post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    begun, may_end, answers, text = threading.Event(), threading.Event(), [], "a" * (LONG_BODY + 1)

    def slow(given: Any, **options: Any) -> list[int]:
        if text in str(given):
            begun.set()
            assert may_end.wait(30)
        return [1]

    monkeypatch.setattr(llm.tokenizer, "encode", slow)
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
    if "chat" in path:
        long = {"prompt": "b" * len(text), "truncate_prompt_tokens": 1}
        assert post("/v1/completions", **long).status_code == 200
    monkeypatch.undo()
    may_end.set()
    client.join()
    assert answers[0].status_code == 200
