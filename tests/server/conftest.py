"""A server over an LLM with known answers, and two clients."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import hosted
from tests.server.http_answers import SECONDS


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """httpx gives up after five seconds, in which a busy machine may not have answered."""
    default: httpx.Timeout = inspect.signature(httpx.post).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = SECONDS


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
def post(url: str) -> Callable[..., httpx.Response]:
    def send(path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{url}{path}", json={"model": MODEL, **body})

    return send
