"""The bytes of requests: sizes of headers, parts in which they arrive, what is not HTTP, and
answers that come before the end of a request."""

import json
import logging
import socket
from asyncio import selector_events

import httpx
import pytest

from tests.server.fake_llm import MODEL, SLOW_PROMPT
from tests.server.hosted import is_serving, serving
from tests.server.http_answers import wait_for
from tests.server.raw_client import completion, connect, head, read_until, status_of, until_closed
from tllm_spec.server import connections
from tllm_spec.server.connections import MAX_HEADER_BYTES

PATH = "/v1/completions"


def arriving_in_parts(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads at most so many bytes at a time."""
    monkeypatch.setattr(selector_events._SelectorSocketTransport, "max_size", size)


@pytest.mark.parametrize(
    ("size", "end"), [(MAX_HEADER_BYTES, b"\r\n\r\n"), (1 << 23, b""), (1 << 23, b"\r\n\r\n")]
)
def test_headers_that_are_too_large_are_refused_with_the_limit(size: int, end: bytes) -> None:
    with serving(header_timeout=600) as host, connect(host.address) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * size + end)
        answer = read_until(client, b"}}")
    assert status_of(answer) == 431 and b"at most 65536 bytes" in answer


@pytest.mark.parametrize("part", [1000, 1 << 18])
@pytest.mark.parametrize("header", [b"", b"a:b\r\n" * 255])
def test_headers_have_the_same_limit_in_whatever_parts_they_arrive(
    part: int, header: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving_in_parts(part, monkeypatch)
    start, end = b"GET /health?", b" HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n"
    with serving(header_timeout=600) as host:
        for size, status in (
            (MAX_HEADER_BYTES, 200),
            (MAX_HEADER_BYTES + 1, 431),
            (1 << 21, 431),
        ):
            with connect(host.address) as client:
                client.sendall(start + b"a" * (size - len(start) - len(end)) + end)
                assert status_of(read_until(client, b"\r\n\r\n")) == status


@pytest.mark.parametrize("part", [1000, 1 << 18])
def test_more_than_256_headers_are_refused_unparsed(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving_in_parts(part, monkeypatch)
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    with serving(header_timeout=600) as host:
        for number, status in ((255, 200), (256, 431), (12_000, 431)):
            with connect(host.address) as client:
                client.sendall(
                    (health + b"a:b\r\n" * number + b"\r\n") * (2 if number < 256 else 1)
                )
                assert status_of(read_until(client, b"\r\n\r\n")) == status


def chunked(path: str, *headers: str, method: str = "POST") -> bytes:
    start = head(path, 0, *headers, method=method)
    return start.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")


TINY = b"1\r\n \r\n"


@pytest.mark.parametrize("key", ["right", "wrong"])
def test_a_body_of_too_many_small_chunks_is_cut_off(key: str) -> None:
    with serving(api_key="right", body_timeout=600) as host, connect(host.address) as client:
        client.sendall(chunked(PATH, f"Authorization: Bearer {key}") + TINY * 20_000)
        answer = until_closed(client)
        assert status_of(answer) == (413 if key == "right" else 401)
        assert key == "wrong" or b"too many small chunks" in answer
        assert is_serving(host)


@pytest.mark.parametrize("size", [1, 5000])
def test_a_body_in_chunks_of_any_size_is_read_to_its_end(size: int) -> None:
    body = completion("a" * (4000 if size == 1 else 100_000)).partition(b"\r\n\r\n")[2]
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    with serving() as host, connect(host.address) as client:
        text = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
        client.sendall(chunked(PATH) + text + b"0\r\n\r\n" + head("/version", 0, method="GET"))
        read_until(client, b'"version"')  # of the request that follows the body
        assert len(host.llm.prompts) == 1


def test_small_chunks_are_parsed_in_turns_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "FREE_CHUNKS", 1 << 30)
    turns: list[object] = []
    add = connections.Turns.add
    monkeypatch.setattr(
        connections.Turns, "add", lambda all_turns, each: turns.append(add(all_turns, each))
    )
    with serving(body_timeout=600) as host, connect(host.address) as client:
        client.sendall(chunked(PATH) + TINY * 1000)
        wait_for(lambda: len(turns) >= 1000 // connections.MAX_EVENTS)
        assert is_serving(host)


@pytest.mark.parametrize("line", [b"1;" + b"a" * 10_000, b"0\r\n" + b"a: b\r\n" * 2000])
def test_a_long_line_of_a_chunk_and_long_trailers_are_refused(line: bytes) -> None:
    with serving(body_timeout=600) as host, connect(host.address) as client:
        client.sendall(chunked(PATH) + line)
        assert status_of(until_closed(client)) == 431


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/health", 200),
        ("DELETE", "/health", 405),
        ("POST", "/health", 405),
        ("POST", "/nothing", 401),
        ("OPTIONS", PATH, 200),
    ],
)
@pytest.mark.parametrize("length", [9_000_000, None])
def test_the_body_of_a_route_that_takes_none_is_not_read(
    method: str, path: str, status: int, length: int | None
) -> None:
    origin = ("Origin: http://a.example", "Access-Control-Request-Method: POST")
    given = chunked(path, *origin, method=method)
    if length is not None:
        given = head(path, length, *origin, method=method)
    with (
        serving(api_key="key", body_timeout=600, allowed_origins=("*",)) as host,
        connect(host.address) as client,
    ):
        client.sendall(given)
        answer = read_until(client, b"\r\n\r\n")
        assert status_of(answer) == status and b"connection: close" in answer.lower()
        until_closed(client)


def test_a_request_without_a_body_keeps_its_connection() -> None:
    with serving(api_key="key") as host, connect(host.address) as client:
        for method, path, status in (("GET", "/health", 200), ("POST", "/health", 405)):
            client.sendall(head(path, 0, method=method))
            assert status_of(read_until(client, b"\r\n\r\n")) == status


@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "br", "deflate", "gzip, gzip"])
def test_a_compressed_body_is_refused_unread(encoding: str) -> None:
    with serving(body_timeout=600) as host, connect(host.address) as client:
        client.sendall(head(PATH, 9_000_000, f"Content-Encoding: {encoding}"))
        answer = until_closed(client)
        assert status_of(answer) == 415 and f"'{encoding}' is not served".encode() in answer
        text = {"model": MODEL, "prompt": "a"}
        same = {"content-encoding": "identity"}
        assert httpx.post(f"{host.url}{PATH}", json=text, headers=same).status_code == 200


@pytest.mark.parametrize("part", [1000, 1 << 18])
def test_what_follows_a_malformed_request_does_not_change_its_answer(
    part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arriving_in_parts(part, monkeypatch)
    with serving() as host, connect(host.address) as client:
        client.sendall(b"no request\r\n\r\n" + b"a" * 2 * MAX_HEADER_BYTES)
        assert status_of(read_until(client, b"}}")) == 400


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_body_that_is_not_http_ends_the_connection_without_a_traceback(
    is_answered: bool, caplog: pytest.LogCaptureFixture
) -> None:
    chunked = head("/health", 0, method="GET").replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    )
    with serving() as host, connect(host.address) as client:
        client.sendall(chunked + (b"" if is_answered else b"zz\r\n"))
        found = read_until(client, b"\r\n\r\n")
        assert status_of(found) == (200 if is_answered else 400)
        client.sendall(b"zz\r\n")
        assert b"HTTP/1.1" not in until_closed(client)
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


@pytest.mark.parametrize("encoding", ["Content-Length: 9000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("key", ["right", "wrong"])
def test_a_client_may_send_the_rest_of_its_body_before_it_reads_the_refusal(
    encoding: str, key: str
) -> None:
    start = head(PATH, 0, f"Authorization: Bearer {key}").replace(
        b"Content-Length: 0", encoding.encode()
    )
    chunk = b"f4240\r\n" + b"a" * 1_000_000 + b"\r\n"
    with serving(api_key="right", max_body_bytes=1000) as host, connect(host.address) as client:
        client.sendall(start + chunk)
        wait_for(lambda: bool(client.recv(1, socket.MSG_PEEK)))
        for _ in range(7):
            client.sendall(chunk)
        assert status_of(until_closed(client)) == (413 if key == "right" else 401)


def test_a_client_that_goes_after_a_second_request_is_noticed() -> None:
    with serving() as host:
        with connect(host.address) as client:
            client.sendall(completion(SLOW_PROMPT))
            wait_for(lambda: bool(host.llm.prompts))
            assert is_serving(host)  # and waits for the slow answer
            client.sendall(head("/health", 0, method="GET"))
        wait_for(lambda: host.llm.aborted == {0})


@pytest.mark.parametrize("is_at_once", [False, True])
def test_what_follows_the_last_request_of_a_connection_is_dropped(is_at_once: bool) -> None:
    last = completion(SLOW_PROMPT).replace(b"Host: ", b"Connection: close\r\nHost: ")
    with serving() as host, connect(host.address) as client:
        client.sendall(last + b"\r\n" * is_at_once)
        wait_for(lambda: bool(host.llm.prompts))
        client.sendall(b"\r\n")
        assert is_serving(host)  # what a client has sent before is read before
        host.llm.aborted.add(0)  # the slow answer ends
        assert status_of(until_closed(client)) == 200


def test_large_headers_that_wait_for_an_answer_are_refused_with_the_limit() -> None:
    with serving(header_timeout=600) as host, connect(host.address) as client:
        client.sendall(
            completion("a") + b"GET /health HTTP/1.1\r\nX: " + b"a" * 2 * MAX_HEADER_BYTES
        )
        assert b"at most 65536 bytes" in until_closed(client)


def test_a_client_that_sends_on_after_a_refusal_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.05)
    with (
        serving(header_timeout=600) as host,
        connect(host.address) as client,
        pytest.raises(OSError),
    ):
        while True:
            client.sendall(b"a" * (1 << 16))


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        ("GET http://localhost:80/health HTTP/1.1\r\nHost: localhost", 200),
        ("GET http://localhost HTTP/1.1\r\nHost: localhost", 200),
        ("GET /health HTTP/1.0", 200),
        ("GET /health HTTP/9.9\r\nHost: localhost", 505),
        ("no request", 400),
    ],
)
def test_odd_requests_are_answered_and_logged_with_their_address(
    request_line: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with serving(hosts=frozenset({"localhost"})) as host, connect(host.address) as client:
        client.sendall(f"{request_line}\r\nConnection: close\r\n\r\n".encode())
        port = client.getsockname()[1]
        assert status_of(read_until(client, b"\r\n\r\n")) == status
    assert status == 200 or f"127.0.0.1:{port}" in caplog.text


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_upgrade_that_is_not_served_is_answered_as_http_without_a_warning(
    protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "a"}).encode()
    upgrade = ("Connection: Upgrade, HTTP2-Settings", f"Upgrade: {protocol}")  # Java's client
    with serving() as host, connect(host.address) as client:
        client.sendall(head(PATH, len(body), *upgrade) + body)
        assert status_of(read_until(client, b"}}")) == 200
    assert not [each for each in caplog.records if each.name.startswith("uvicorn")]
