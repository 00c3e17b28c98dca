"""A server that shuts down lets requests finish, until a deadline."""

import asyncio
import socket

import httpx
import pytest
from starlette.testclient import TestClient

from tests.server.fake_llm import MODEL, SLOW_PROMPT, FakeLLM
from tests.server.hosted import Host
from tests.server.raw_client import (
    ask_for_a_long_answer,
    completion,
    connect,
    head,
    read_until,
    until_closed,
)
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.http_server import HttpServer
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


def test_a_client_that_reads_late_gets_its_whole_answer_from_a_server_that_ends() -> None:
    host = host_with(600)
    with ask_for_a_long_answer(host.listener) as client:
        host.stop()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{host.url}/health", timeout=5)
        assert not host.ended.wait(0.05)
        assert until_closed(client).endswith(b"]}")
    host.join()


def test_a_client_that_connects_as_the_server_stops_causes_no_error_in_the_loop() -> None:
    errors: list[object] = []

    async def serve(listener: socket.socket) -> socket.socket:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        app = OpenAIServer(FakeLLM(), MODEL).app()
        server = HttpServer(app, ServerOptions(shutdown_timeout=1))
        serving = asyncio.create_task(server.serve(listener, stop, lambda: None))
        for _ in range(3):  # then it waits for connections
            await asyncio.sleep(0)
        stop.set()
        client = connect(listener.getsockname())
        await serving
        return client

    asyncio.run(serve(socket.create_server(("127.0.0.1", 0)))).close()
    assert errors == []


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
