"""A server over an LLM with known answers, and two clients."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from tests.server.fake_llm import MODEL, FakeLLM
from tllm_spec.server.app import OpenAIServer


@pytest.fixture(scope="module")
def llm() -> FakeLLM:
    return FakeLLM()


@pytest.fixture(scope="module")
def url(llm: FakeLLM) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    app = OpenAIServer(llm, MODEL).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join()
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
