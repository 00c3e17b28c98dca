"""A server over an LLM with known answers, and two clients."""

import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import SECONDS, Post


@pytest.fixture(autouse=True, scope="session")
def patience() -> Iterator[None]:
    """On a machine with much else to do an answer may take longer than httpx's five seconds. And
    httpx would read the certificates of all authorities for each request, which takes longer than
    most of these tests."""
    options = {"timeout": SECONDS, "verify": ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get", "post", "request", "stream"):
            patch.setattr(httpx, name, partial(getattr(httpx, name), **options))
        yield


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    with hosted(llm) as url:
        yield url
    assert llm.is_shut_down


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def post(url: str) -> Post:
    def send(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{url}{path}", json={"model": MODEL, **body})

    return send
