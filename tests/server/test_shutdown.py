"""A server that shuts down lets requests finish, until a deadline."""

import asyncio

import httpx
import pytest
from starlette.testclient import TestClient

from tests.server.fake_llm import MODEL, SLOW_PROMPT, FakeLLM
from tests.server.hosted import Host
from tests.server.raw_client import completion, connect, head, read_until, until_closed
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.options import ServerOptions


def host_with(shutdown_timeout: float) -> Host:
    return Host(FakeLLM(), ServerOptions(shutdown_timeout=shutdown_timeout))


def test_a_running_request_is_finished_and_no_new_connection_is_accepted() -> None:
    """Also if another process has the listening socket, too."""
    host = host_with(600)
    copy = host.listener.dup()
    with connect(host.address) as client, connect(host.address) as idle:
        client.sendall(completion(SLOW_PROMPT, stream=True))
        read_until(client, b"data: ")
        host.stop()
        assert until_closed(idle) == b""
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{host.url}/health", timeout=5)
        host.llm.aborted.add(0)  # the slow answer ends
        assert until_closed(client).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert host.ended.wait(60)
    host.join()
    copy.close()


def test_health_says_that_the_server_is_about_to_end_and_nothing_else_does() -> None:
    draining, llm = asyncio.Event(), FakeLLM()
    draining.set()
    app = OpenAIServer(llm, MODEL, draining=draining).app()
    with TestClient(app) as client:
        assert client.get("/health").status_code == 503
        body = {"model": MODEL, "prompt": "a"}
        assert client.post("/v1/completions", json=body).status_code == 200


def test_what_still_runs_at_the_deadline_is_ended() -> None:
    host = host_with(0.05)
    with connect(host.address) as client, connect(host.address) as half:
        half.sendall(head("/v1/completions", 100) + b"{")
        client.sendall(completion(SLOW_PROMPT, stream=True))
        read_until(client, b"data: ")
        host.stop()
        assert host.ended.wait(60)
        assert until_closed(half) == b""
        until_closed(client)
    assert host.llm.is_shut_down and host.llm.aborted == {0}
    host.join()
