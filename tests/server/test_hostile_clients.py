"""Clients that send too much, too slowly or not at all, by raw sockets."""

import asyncio
import errno
import json
import resource
import socket
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import httpx
import openai
import pytest

from tests.server.fake_llm import (
    FAILING_PROMPT,
    MAX_LEN,
    MODEL,
    SLOW_GRAMMAR_PROMPT,
    SLOW_PROMPT,
    FakeLLM,
)
from tests.server.hosted import Host, is_serving, serving
from tests.server.http_answers import Post, wait_for
from tests.server.raw_client import (
    ask_for_a_long_answer,
    completion,
    connect,
    head,
    read_until,
    status_of,
    until_closed,
)
from tllm_spec.sampling_params import RequestOptions, SamplingParams
from tllm_spec.server import bodies
from tllm_spec.server.child import MIN_FILES, WANTED_FILES, memory_note, raise_file_limit
from tllm_spec.server.streaming import Running

CHAT = [{"role": "user", "content": "a"}]
PATH = "/v1/completions"


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    with serving(max_body_bytes=1000) as host, connect(host.address) as client:
        client.sendall(head(PATH, 1001, "Expect: 100-continue"))
        answer = until_closed(client)
        assert status_of(answer) == 413
        assert b"at most 1000 bytes" in answer
        assert not host.llm.prompts and is_serving(host)


def test_a_client_that_sends_too_much_reads_the_refusal_nevertheless() -> None:
    body = b'{"user": "' + b"x" * 1500 + b'"}'
    with serving(max_body_bytes=1000) as host:
        response = httpx.post(f"{host.url}{PATH}", content=body)
        assert response.status_code == 413
        assert response.headers["connection"] == "close"


def test_a_chunked_body_is_cut_off_at_the_limit() -> None:
    with serving(max_body_bytes=1000) as host, connect(host.address) as client:
        start = head(PATH, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        client.sendall(start + b"3e9\r\n" + b"x" * 1001 + b"\r\n")
        assert status_of(until_closed(client)) == 413


def test_a_body_with_millions_of_values_is_refused_unparsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "MAX_VALUES", 10)
    with serving() as host:
        url = f"{host.url}{PATH}"
        assert httpx.post(url, content="[" * 11).status_code == 413
        assert httpx.post(url, content="[" * 10).status_code == 400


@pytest.mark.parametrize("character", ["Ā", "中", "😀", "\\u4e2d"])
def test_a_text_that_takes_several_bytes_a_character_may_have_a_quarter_of_the_limit(
    character: str,
) -> None:
    with serving(max_body_bytes=1000) as host:
        url = f"{host.url}{PATH}"
        for length, status in ((240, 400), (251, 413)):
            text = character.encode()
            body = b'"' + b"a" * (length - 2 - len(text)) + text + b'"'
            assert httpx.post(url, content=body).status_code == status
        assert httpx.post(url, content='"' + "é" * 400 + '"').status_code == 400


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """A server where a body is large from 100 bytes on, and 500 bytes above that are a client's."""
    monkeypatch.setattr(bodies, "LARGE_BODY", 100)
    monkeypatch.setattr(bodies, "NUM_SMALL", 3)
    keys = {"anna": "a", "bert": "b", "cleo": "c"}
    with serving(max_body_bytes=500, body_timeout=600, api_key=keys) as host:
        yield host


def half_a_body(host: Host, key: str, num_bytes: int) -> socket.socket:
    client = connect(host.address)
    client.sendall(head(PATH, num_bytes + 1, f"Authorization: Bearer {key}") + b" " * num_bytes)
    return client


def status_of_spaces(host: Host, key: str, num_bytes: int) -> int:
    """A body of spaces is no JSON: 400 says that it has been read."""
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{host.url}{PATH}", content=b" " * num_bytes, headers=headers).status_code


def test_a_client_whose_large_bodies_take_its_share_is_told_to_come_again(held: Host) -> None:
    with half_a_body(held, "a", 450):
        wait_for(lambda: status_of_spaces(held, "a", 300) == 503)
        assert status_of_spaces(held, "a", 90) == 400, "small bodies do not wait for it"
        assert status_of_spaces(held, "b", 400) == 400, "and other clients have their own share"
    wait_for(lambda: status_of_spaces(held, "a", 300) == 400)


def test_a_client_with_too_many_small_bodies_delays_no_other_one(held: Host) -> None:
    many = [half_a_body(held, "a", 90) for _ in range(3)]
    wait_for(lambda: status_of_spaces(held, "a", 90) == 503)
    assert status_of_spaces(held, "b", 90) == 400
    for client in many:
        client.close()
    wait_for(lambda: status_of_spaces(held, "a", 90) == 400)


def test_clients_that_have_more_than_their_part_leave_room_for_another_one(
    held: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "NUM_CLIENTS", 1)
    with half_a_body(held, "a", 499):
        wait_for(lambda: status_of_spaces(held, "a", 300) == 503)
        assert status_of_spaces(held, "b", 300) == 400
        assert status_of_spaces(held, "b", 400) == 503


def test_a_client_that_reads_no_answer_keeps_no_large_body_of_another_one_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bodies, "LARGE_BODY", 100)
    with serving() as host, ask_for_a_long_answer(host.listener) as client:
        client.sendall(head("/tokenize", 200) + b" " * 200)
        wait_for(lambda: len(host.http._state.tasks) == 1)  # it waits for the answer before
        assert httpx.post(f"{host.url}{PATH}", content=b" " * 200).status_code == 400


def test_half_a_header_is_cut_off_after_the_time_limit() -> None:
    with serving(header_timeout=0.05) as host:
        for sent in (b"", b"POST /v1/compl", b"POST / HTTP/1.1\r\nHost: a\r\n"):
            with connect(host.address) as client:
                client.sendall(sent)
                assert until_closed(client) == b""


def test_half_a_header_after_a_first_answer_is_cut_off_too() -> None:
    with serving(header_timeout=600) as host, connect(host.address) as client:
        client.sendall(completion("a"))
        read_until(client, b"}}")
        host.http._protocol.header_timeout = 0.05
        client.sendall(b"POST /v1/compl")
        assert b"HTTP/1.1 200" not in until_closed(client)


def test_half_a_body_is_answered_with_a_time_out() -> None:
    with serving(body_timeout=0.05) as host, connect(host.address) as client:
        client.sendall(head(PATH, 100) + b'{"prompt": ')
        answer = until_closed(client)
        assert status_of(answer) == 408
        assert b"has not arrived within 0.05 s" in answer


def test_an_idle_connection_is_closed() -> None:
    with serving(timeout_keep_alive=0.05) as host, connect(host.address) as client:
        client.sendall(completion("a"))
        assert status_of(until_closed(client)) == 200


def test_idle_connections_make_way_for_new_ones_at_the_limit() -> None:
    with serving(max_connections=3, header_timeout=600) as host:
        idle = [connect(host.address) for _ in range(8)]
        assert is_serving(host)
        assert until_closed(idle[0]) == b"", "the oldest goes first"
        for client in idle:
            client.close()


def test_a_client_that_reads_late_does_not_make_way_for_a_new_one_at_the_limit() -> None:
    with (
        serving(max_connections=2, header_timeout=600) as host,
        ask_for_a_long_answer(host.listener) as late,
        connect(host.address) as idle,
    ):
        assert is_serving(host) and until_closed(idle) == b""
        assert is_serving(host)
        read_until(late, b"]}")


def test_a_connection_waits_while_all_others_are_being_answered() -> None:
    with serving(max_connections=2) as host:
        busy = [connect(host.address) for _ in range(2)]
        for client in busy:
            client.sendall(completion(SLOW_PROMPT, stream=True))
            read_until(client, b"data: ")
        with connect(host.address) as late:
            late.sendall(head("/health", 0, method="GET"))
            busy[0].close()
            assert status_of(read_until(late, b"\r\n\r\n")) == 200
        busy[1].close()


def test_the_limit_of_open_files_is_raised() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 1024 if hard == resource.RLIM_INFINITY else min(1024, hard - 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        with serving() as host:
            assert is_serving(host)
            raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert raised == (1 << 16 if hard == resource.RLIM_INFINITY else min(1 << 16, hard))


def test_while_no_file_is_left_clients_wait_and_the_log_has_a_line_a_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files") for _ in range(2)]
    accept = socket.socket.accept

    def scarce(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    with serving() as host:
        assert is_serving(host)
    lines = [each.getMessage() for each in caplog.records if each.levelname != "INFO"]
    assert len(lines) == 2 and all("no connection can be accepted" in line for line in lines)


def test_the_number_of_connections_leaves_files_for_other_things(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tllm_spec.server.http_server.raise_file_limit", lambda: 40)
    with serving(header_timeout=600) as host:
        idle = [connect(host.address) for _ in range(40)]
        assert is_serving(host)
        for client in idle[:30]:
            assert until_closed(client) == b""


def test_a_full_queue_is_answered_with_429_and_when_to_come_again() -> None:
    with serving(max_queue_size=1) as host:
        room = host.llm.args.max_batch_size + 1
        host.llm.running |= set(range(10_000, 10_000 + room - 99))
        url, body = f"{host.url}{PATH}", {"model": "fake", "prompt": "a", "n": 100}
        response = httpx.post(url, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (429, "1")
        assert httpx.post(url, json=body | {"n": 99}).status_code == 200


def test_a_request_that_no_empty_server_would_take_is_a_mistake() -> None:
    with serving(max_queue_size=0) as host:
        number = host.llm.args.max_batch_size + 1
        body = {"model": "fake", "prompt": ["a"] * number}
        response = httpx.post(f"{host.url}{PATH}", json=body)
        assert response.status_code == 400
        assert "send several requests" in response.json()["error"]["message"]


def test_a_client_that_has_its_share_is_told_to_come_again() -> None:
    with serving(max_client_choices=2) as host:
        url, body = f"{host.url}{PATH}", {"model": "fake", "prompt": "a"}
        slow = body | {"prompt": SLOW_PROMPT, "stream": True}
        with httpx.stream("POST", url, json=slow, timeout=60) as response:
            lines = response.iter_lines()  # httpx hangs up when this is collected
            assert next(lines).startswith("data: ")
            refused = httpx.post(url, json=body | {"n": 2})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert httpx.post(url, json=body).status_code == 200
        wait_for(lambda: host.llm.aborted == {0})
        wait_for(lambda: httpx.post(url, json=body | {"n": 2}).status_code == 200)
        assert httpx.post(url, json=body | {"n": 3}).status_code == 400


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_request_for_more_tokens_than_its_budget_is_a_mistake(path: str) -> None:
    prompt = {"prompt": "a"} if path == "completions" else {"messages": CHAT}
    with serving(max_request_tokens=60) as host:
        url, body = f"{host.url}/v1/{path}", {"model": "fake", **prompt}
        assert httpx.post(url, json=body | {"n": 3, "max_tokens": 20}).status_code == 200
        refused = httpx.post(url, json=body | {"n": 3, "max_tokens": 21})
        assert refused.status_code == 400
        assert "3 choices of 21 tokens" in refused.json()["error"]["message"]
        assert httpx.post(url, json=body | {"n": 61}).status_code == 400


def test_a_chat_without_max_tokens_has_its_part_of_the_budget() -> None:
    with serving(max_request_tokens=60) as host:
        body = {"model": "fake", "messages": CHAT, "n": 2}
        assert httpx.post(f"{host.url}/v1/chat/completions", json=body).status_code == 200
        assert host.llm.sampling[-1].max_tokens == 30


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_takes_too_long_is_ended(stream: bool) -> None:
    with serving(request_timeout=0.05) as host:
        body = {"model": "fake", "prompt": SLOW_PROMPT, "stream": stream}
        response = httpx.post(f"{host.url}{PATH}", json=body, timeout=60)
        assert response.status_code == (200 if stream else 504)
        assert "took longer than 0.05 s" in response.text
        wait_for(lambda: host.llm.aborted == {0})


# Requests that fail, are refused in part, or lose their client.


def test_when_one_prompt_is_refused_the_others_are_aborted(post: Post, llm: FakeLLM) -> None:
    assert post("/v1/completions", prompt=["good", ""]).status_code == 400
    assert len(llm.prompts) - 1 in llm.aborted


def test_when_the_engine_ends_between_two_prompts_the_first_one_is_aborted(
    post: Post, llm: FakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = llm.submit

    def once(*inputs: Any, **options: Any) -> Any:
        monkeypatch.setattr(llm, "submit", ended)
        return generate(*inputs, **options)

    def ended(*inputs: Any, **options: Any) -> Any:
        raise RuntimeError("the engine's process has ended")

    monkeypatch.setattr(llm, "submit", once)
    assert post("/v1/completions", prompt=["good", "good"]).status_code == 503
    assert len(llm.prompts) - 1 in llm.aborted


def test_a_request_that_fails_in_the_engine_is_a_server_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not numbers"):
        client.completions.create(model=MODEL, prompt=FAILING_PROMPT)


def test_a_grammar_that_takes_too_long_is_the_requests_mistake(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="the grammar takes too long"):
        client.completions.create(model=MODEL, prompt=SLOW_GRAMMAR_PROMPT)


def test_a_stream_that_fails_ends_with_an_error_event(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="not numbers"):
        list(client.completions.create(model=MODEL, prompt=FAILING_PROMPT, stream=True))


def test_a_client_that_disconnects_aborts_its_request(url: str, llm: FakeLLM) -> None:
    request_id = len(llm.prompts)
    address, body = httpx.URL(url), json.dumps({"model": MODEL, "prompt": SLOW_PROMPT})
    head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
    with socket.create_connection((address.host, address.port or 80)) as connection:
        lines = (*head, f"Content-Length: {len(body)}", "", body)
        connection.sendall("\r\n".join(lines).encode())
        wait_for(lambda: request_id in llm.running)
    wait_for(lambda: request_id not in llm.running)
    assert request_id in llm.aborted


def test_a_client_that_closes_a_stream_aborts_its_request(url: str, llm: FakeLLM) -> None:
    request_id = len(llm.prompts)
    body = {"model": MODEL, "prompt": SLOW_PROMPT, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert request_id in llm.running
    wait_for(lambda: request_id in llm.aborted and request_id not in llm.running)


def test_closing_the_generator_of_updates_aborts_all_requests() -> None:
    async def leave() -> set[int]:
        llm = FakeLLM()
        options = RequestOptions(streaming=True)
        handles = [llm.submit(SLOW_PROMPT, SamplingParams(), options) for _ in range(3)]
        async with aclosing(Running(handles, 60).updates()) as outputs:
            await anext(outputs)
        return llm.aborted

    assert asyncio.run(leave()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5] * (MAX_LEN + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a " * MAX_LEN}]}),
    ],
)
def test_a_prompt_that_is_too_long_has_openais_error_code(
    post: Post, path: str, body: dict[str, Any]
) -> None:
    response = post(path, **body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in error["message"]


# Limits that the host sets are read before they are met.


INFINITY = resource.RLIM_INFINITY


class Limits:
    """What the host would say; `raised` is what was asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> None:
        self.raised: list[tuple[int, int]] = []
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: self.raised.append(limits))


@pytest.mark.parametrize(
    ("soft", "hard", "found"),
    [
        (1024, INFINITY, WANTED_FILES),
        (1024, 4096, 4096),
        (INFINITY, INFINITY, WANTED_FILES),
        (1 << 20, 1 << 20, 1 << 20),
        (MIN_FILES, MIN_FILES, MIN_FILES),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, found: int
) -> None:
    limits = Limits(monkeypatch, soft, hard)
    assert raise_file_limit() == found
    assert all(limit == (found, hard) for limit in limits.raised)


def test_too_few_open_files_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    Limits(monkeypatch, 20, 20)
    with pytest.raises(ValueError, match=r"may have 20 open files, .* \(ulimit -n\)"):
        raise_file_limit()


def test_a_limit_of_the_address_space_is_named_where_a_process_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Limits(monkeypatch, INFINITY, INFINITY)
    assert memory_note() == ""
    Limits(monkeypatch, 600 << 20, INFINITY)
    assert memory_note() == "; a process may have 600 MiB of address space (ulimit -v)"
