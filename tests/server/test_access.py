"""Who may call the server: Host names, keys, TLS; and what it logs of a call."""

import asyncio
import logging
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.server.fake_llm import MODEL, FakeLLM
from tests.server.hosted import Host, hosted
from tests.server.http_answers import wait_for
from tllm_spec.server.http_server import HttpServer, Tls
from tllm_spec.server.options import ServerOptions, hosts_of

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 3}


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("", 403),
    ],
)
def test_on_localhost_only_its_own_host_names_are_served(host: str, status: int) -> None:
    with hosted(FakeLLM(), ServerOptions(hosts=hosts_of("localhost"))) as url:
        assert httpx.get(f"{url}/version", headers={"Host": host}).status_code == status


def test_a_public_address_is_served_under_any_name() -> None:
    assert hosts_of("0.0.0.0") is None and hosts_of("10.1.2.3") is None


def test_a_key_is_needed_everywhere_but_at_health() -> None:
    with hosted(FakeLLM(), ServerOptions(api_key="secret")) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            refusal = httpx.post(f"{url}/v1/completions", json=BODY, headers=given)
            assert refusal.status_code == 401
            assert refusal.json()["error"]["code"] == "invalid_api_key"
            assert httpx.get(f"{url}/metrics", headers=given).status_code == 401
        given = {"Authorization": "Bearer secret"}
        assert httpx.post(f"{url}/v1/completions", json=BODY, headers=given).status_code == 200


def test_an_answer_has_the_clients_request_id_or_a_new_one(url: str) -> None:
    answer = httpx.get(f"{url}/version", headers={"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    for given in ({}, {"X-Request-Id": "two words"}, {"X-Request-Id": "x" * 200}):
        ids = {httpx.get(f"{url}/version", headers=given).headers["x-request-id"] for _ in "ab"}
        assert len(ids) == 2 and all(each.startswith("req-") for each in ids)


@pytest.mark.parametrize("stream", [False, True])
def test_the_access_log_has_duration_and_tokens(
    url: str, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, "tllm_spec.access")
    headers = {"X-Request-Id": "mine-2"}
    httpx.post(f"{url}/v1/completions", json=BODY | {"stream": stream}, headers=headers)
    wait_for(lambda: any("mine-2" in line for line in caplog.messages))
    (line,) = [line for line in caplog.messages if "mine-2" in line]
    assert "POST '/v1/completions' 200 in 0." in line
    assert ", 1 + 3 tokens [mine-2]" in line


def certificate(folder: Path) -> Tls:
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    options = ["-nodes", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", key, "-out", cert]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return Tls(certfile=cert, keyfile=key)


def test_with_a_certificate_the_server_speaks_https(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    host = Host(FakeLLM(), ServerOptions(shutdown_timeout=5), tls)
    context = ssl.create_default_context(cafile=tls.certfile)
    try:
        with httpx.Client(verify=context) as client:
            answer = client.post(f"{host.url}/v1/completions", json=BODY)
            assert answer.json()["usage"]["completion_tokens"] == 3
        with pytest.raises(httpx.HTTPError):
            httpx.get(host.url.replace("https", "http"))
    finally:
        host.join()


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--ssl_certfile or --ssl_keyfile"):
        HttpServer(None, ServerOptions(), Tls(certfile=str(tmp_path / "none.pem")))


def test_an_address_that_another_process_listens_on_by_then_is_named() -> None:
    """Two sockets may be bound to it until one of them listens."""
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        first.listen()
        server = HttpServer(None, ServerOptions())
        with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1, port \d+: "):
            asyncio.run(server.serve(second, asyncio.Event(), lambda: None))
