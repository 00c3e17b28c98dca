"""Grammars that compile for long, and the clients that wait for others."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.http_answers import Post, wait_for


class Compiling:
    """Grammars whose name begins with "slow" compile until `go_on` is set. `asked`: those that
    have begun. Each test has its own: the server remembers them."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go_on = threading.Event()

    def __call__(self, params: Any) -> None:
        self.asked.append(params.guided_decoding.regex)
        assert not self.asked[-1].startswith("slow") or self.go_on.wait(60)


@pytest.fixture
def compiling(llm: FakeLLM) -> Iterator[Compiling]:
    llm.compiling = compiling = Compiling()
    yield compiling
    compiling.go_on.set()


class Clients:
    """Threads that ask for a grammar, each from an address."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._threads: list[threading.Thread] = []
        self.statuses: list[int] = []

    def start(self, regex: str, address: str = "127.0.0.1") -> None:
        thread = threading.Thread(target=self.ask, args=(regex, address))
        self._threads.append(thread)
        thread.start()

    def ask(self, regex: str, address: str = "127.0.0.1") -> None:
        body = {"model": MODEL, "prompt": "a", "guided_regex": regex}
        with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
            answer = client.post(f"{self._url}/v1/completions", json=body, timeout=60)
        self.statuses.append(answer.status_code)

    def ask_and_leave(self, regex: str, stay: Callable[[], None]) -> None:
        """Leaves after `stay`."""
        body = json.dumps({"model": MODEL, "prompt": "a", "guided_regex": regex})
        host, port = self._url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            stay()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def clients(url: str) -> Clients:
    return Clients(url)


def test_grammars_that_compile_for_long_delay_no_request_without_a_new_one(
    clients: Clients, post: Post, compiling: Compiling
) -> None:
    clients.ask("known")
    for i in range(6):
        for address in ("127.0.0.1", "127.0.0.2"):
            clients.start(f"slow{i}{address[-1]}", address)
    wait_for(lambda: len(compiling.asked) == 3)
    assert post("/v1/completions", prompt="a").status_code == 200
    clients.ask("known")
    assert len(clients.statuses) == 2 and compiling.asked.count("known") == 1
    compiling.go_on.set()
    clients.join()
    assert clients.statuses == [200] * 14


def test_a_client_with_slow_grammars_delays_no_other_client(
    clients: Clients, compiling: Compiling
) -> None:
    for i in range(4):
        for address in ("127.0.0.1", "127.0.0.3", "127.0.0.4"):
            clients.start(f"slow of {address}: {i}", address)
    wait_for(lambda: len(compiling.asked) == 3)
    clients.ask("quick of another", "127.0.0.2")
    assert len(compiling.asked) == 4 and compiling.asked[3] == "quick of another"
    compiling.go_on.set()
    clients.join()
    assert clients.statuses == [200] * 13


def wait_for_a_turn() -> None:
    """Nothing tells that a client waits. If it comes too late, the test passes all the same."""
    time.sleep(0.3)


@pytest.fixture
def leave(clients: Clients, caplog: pytest.LogCaptureFixture) -> Callable[..., None]:
    """Asks for a grammar, and leaves before it is compiled."""

    def left(regex: str, stay: Callable[[], None] = wait_for_a_turn) -> None:
        caplog.clear()
        with caplog.at_level("INFO", "tllm_spec.access"):
            clients.ask_and_leave(regex, stay)
            wait_for(lambda: " 499 in " in caplog.text)

    return left


def test_a_client_that_leaves_has_no_second_turn_while_its_grammar_is_compiled(
    clients: Clients, compiling: Compiling, leave: Callable[..., None]
) -> None:
    leave("slow and left", lambda: wait_for(lambda: len(compiling.asked) == 1))
    leave("slow and second")
    assert compiling.asked == ["slow and left"]
    compiling.go_on.set()
    clients.ask("slow and third")
    assert compiling.asked == ["slow and left", "slow and third"]


def test_the_grammar_of_a_client_that_has_left_is_not_compiled(
    clients: Clients, compiling: Compiling, leave: Callable[..., None]
) -> None:
    clients.start("slow and first")
    wait_for(lambda: len(compiling.asked) == 1)
    leave("left")
    compiling.go_on.set()
    clients.join()
    clients.ask("next")
    assert compiling.asked == ["slow and first", "next"]
