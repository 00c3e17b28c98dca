"""Who may call the server: Host names, keys, TLS; and what it logs of a call."""

import asyncio
import logging
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import httpx
import pytest

from tests.server.fake_llm import MODEL, SLOW_PROMPT, FakeLLM
from tests.server.hosted import Host, hosted
from tests.server.http_answers import wait_for
from tllm_spec.server.guard import client_of_address
from tllm_spec.server.http_server import HttpServer, Tls
from tllm_spec.server.options import LOCAL_HOSTS, ServerOptions, hosts_of, read_keys

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


def test_a_host_name_is_refused_with_its_cure_and_served_once_it_is_allowed() -> None:
    hosts = hosts_of("localhost", ("gpu.lan", "[fd00::1]"))
    with hosted(FakeLLM(), ServerOptions(hosts=hosts)) as url:

        def ask(host: str) -> httpx.Response:
            return httpx.get(f"{url}/version", headers={"Host": host})

        for name in ("GPU.lan:80", "[fd00::1]", "localhost"):
            assert ask(name).status_code == 200
        assert "start it with --allowed_hosts evil.lan" in ask("evil.lan:80").text
    assert hosts_of("0.0.0.0", ("gpu.lan",)) == sorted(LOCAL_HOSTS | {"gpu.lan"})
    assert hosts_of("localhost", ("*",)) is None


def test_pages_of_allowed_origins_may_call_the_server_and_read_its_errors() -> None:
    origin, key = "https://chat.example", {"Authorization": "Bearer k"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    options = ServerOptions(api_key="k", allowed_origins=(origin,))
    with hosted(FakeLLM(), options) as url:
        path = f"{url}/v1/completions"
        answers = [
            httpx.options(path, headers={"Origin": origin, **preflight}),
            httpx.post(path, json=BODY, headers={"Origin": origin, **key}),
            httpx.post(path, json=BODY, headers={"Origin": origin}),
        ]
        assert [answer.status_code for answer in answers] == [200, 200, 401]
        assert {each.headers["access-control-allow-origin"] for each in answers} == {origin}
        other = httpx.options(path, headers={"Origin": "https://evil.example", **preflight})
        assert "access-control-allow-origin" not in other.headers


def test_without_allowed_origins_a_preflight_is_refused(url: str) -> None:
    given = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    refusal = httpx.options(f"{url}/v1/completions", headers=given)
    assert refusal.status_code == 405 and "access-control-allow-origin" not in refusal.headers


@pytest.mark.parametrize(
    ("trusted", "client"),
    [((), "127.0.0.1"), (("127.0.0.0/8",), "10.9.8.7"), (("10.0.0.1",), "127.0.0.1")],
)
def test_only_trusted_proxies_say_who_the_client_is(trusted: tuple[str, ...], client: str) -> None:
    llm = FakeLLM()
    with hosted(llm, ServerOptions(trusted_proxies=trusted)) as url:
        given = {"X-Forwarded-For": "1.2.3.4, 10.9.8.7"}
        assert httpx.post(f"{url}/v1/completions", json=BODY, headers=given).status_code == 200
    assert llm.callers == [((client, ""), None)]


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("fd00:1:2:3:4:5:6:7", "fd00:1:2:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unknown", "unknown"),
        ("", ""),
    ],
)
def test_all_addresses_of_one_host_are_one_client(address: str, client: str) -> None:
    assert client_of_address(address) == client


def test_a_stream_tells_proxies_not_to_collect_it(url: str) -> None:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": True})
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache"


def test_probes_and_scrapes_are_in_the_access_log_only_when_they_fail_or_at_level_debug(
    llm: FakeLLM, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    def logged(path: str) -> bool:
        name = f"{path}-{len(caplog.messages)}-{caplog.handler.level}".replace("/", ":")
        for each in (path, "/version"):
            httpx.get(f"{url}{each}", headers={"X-Request-Id": name})
        wait_for(lambda: any("/version" in line and name in line for line in caplog.messages))
        return any(path in line and name in line for line in caplog.messages)

    caplog.set_level(logging.INFO, "tllm_spec.access")
    assert not any(map(logged, ("/health", "/metrics", "/prometheus/metrics")))
    llm.is_healthy = False
    try:
        assert logged("/health")
    finally:
        llm.is_healthy = True
    caplog.set_level(logging.DEBUG, "tllm_spec.access")
    assert logged("/health")


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


def test_named_keys_tell_clients_apart_and_give_each_a_prefix_cache_of_its_own() -> None:
    llm = FakeLLM()
    with hosted(llm, ServerOptions(api_key={"a": "one", "b": "two"})) as url:

        def send(key: str, **more: str) -> tuple[tuple[str, ...], str | None]:
            given = {"Authorization": f"Bearer {key}"}
            answer = httpx.post(f"{url}/v1/completions", json=BODY | more, headers=given)
            assert answer.status_code == 200, answer.text
            return llm.callers[-1]

        first, salt = send("one", user="u")
        assert first == ("key a", "u") and send("one")[0] == ("key a", "")
        salts = {
            salt,
            send("two")[1],
            send("one", cache_salt="s")[1],
            send("two", cache_salt="s")[1],
        }
        assert len(salts) == 4 and None not in salts and send("one")[1] == salt
        assert httpx.get(f"{url}/version", headers={"Authorization": "Bearer"}).status_code == 401


def test_without_named_keys_a_client_is_its_address_and_shares_the_cache_unless_it_has_a_salt(
    llm: FakeLLM, url: str
) -> None:
    def send(path: str = "completions", **more: object) -> tuple[tuple[str, ...], str | None]:
        body = {"model": MODEL, **more} if path == "responses" else BODY | more
        assert httpx.post(f"{url}/v1/{path}", json=body).status_code == 200
        return llm.callers[-1]

    assert send() == (("127.0.0.1", ""), None)
    assert send(safety_identifier="u" * 100)[0] == send(user="u" * 100)[0] != send(user="u")[0]
    assert send(cache_salt="s")[1] == send("responses", input="a", cache_salt="s")[1]
    assert None not in (salt := send(cache_salt="t")) and salt != send(cache_salt="s")
    refusal = httpx.post(f"{url}/v1/completions", json=BODY | {"cache_salt": ""})
    assert refusal.status_code == 400 and refusal.json()["error"]["param"] == "cache_salt"


def test_a_client_that_has_filled_the_queue_leaves_places_for_others() -> None:
    llm = FakeLLM(max_batch_size=8)
    options = ServerOptions(max_queue_size=8, api_key={"a": "one", "b": "two"}, shutdown_timeout=0)
    with hosted(llm, options) as url, httpx.Client(timeout=60) as client:

        def send(key: str, prompt: str = "a", **more: object) -> int:
            given = {"Authorization": f"Bearer {key}"}
            body = {"model": MODEL, "prompt": prompt, **more}
            return client.post(f"{url}/v1/completions", json=body, headers=given).status_code

        flood = threading.Thread(target=send, args=("one", SLOW_PROMPT), kwargs={"n": 16})
        flood.start()
        wait_for(lambda: bool(llm.running))
        llm.running |= set(range(1000, 1015))  # each choice counts
        assert send("one") == 429 and send("two", n=2) == 429 and send("two") == 200
        llm.aborted.add(0)
        flood.join()


def test_keys_come_from_the_command_line_or_a_file_of_names(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# clients\n\nann: k-1:x \nbob.b:\tk 2\n")
    assert read_keys(f"@{path}") == {"ann": "k-1:x", "bob.b": "k 2"}
    assert read_keys(" abc\n") == "abc" and read_keys(None) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no line"),
        ("ann", r"line 1 of .* the key is empty"),
        ("a b: k", r"line 1 of .* is not `name: key`"),
        ("a: k\na: l", "line 2 of .* for the second time"),
        ("a: k\nb: k", "line 2 of .* for the second time"),
        ("a: k\tl", "control character"),
    ],
)
def test_a_mistake_in_a_file_of_keys_is_named_with_its_line(
    tmp_path: Path, text: str, reason: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_keys(f"@{path}")
    with pytest.raises(ValueError, match=f"write @{path} to read it"):
        read_keys(str(path))


@pytest.mark.parametrize("key", ["", " \n", "a\nb", "a\0"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="--api_key"):
        read_keys(key)


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


def test_a_client_that_never_begins_with_tls_does_not_delay_the_end(tmp_path: Path) -> None:
    host = Host(FakeLLM(), ServerOptions(shutdown_timeout=600), certificate(tmp_path))
    with socket.create_connection(host.address) as silent:
        assert httpx.get(f"{host.url}/health", verify=False).status_code == 200
        host.stop()
        assert host.ended.wait(60)
        assert silent.recv(1) == b""
    host.join()


def test_clients_that_never_begin_with_tls_count_and_make_way_for_new_ones(tmp_path: Path) -> None:
    options = ServerOptions(shutdown_timeout=5, max_connections=3, header_timeout=600)
    host = Host(FakeLLM(), options, certificate(tmp_path))
    silent = [socket.create_connection(host.address, timeout=30) for _ in range(8)]
    assert httpx.get(f"{host.url}/health", verify=False).status_code == 200
    for client in silent[:6]:
        assert client.recv(1) == b"", "the oldest go first"
    for client in silent:
        client.close()
    wait_for(lambda: not host.http._state.connections)
    host.join()


@pytest.mark.parametrize("sent", [b"", b"\x16\x03"])
def test_a_handshake_has_the_time_limit_of_headers(tmp_path: Path, sent: bytes) -> None:
    options = ServerOptions(shutdown_timeout=5, header_timeout=0.5)
    host = Host(FakeLLM(), options, certificate(tmp_path))
    with socket.create_connection(host.address, timeout=30) as silent:
        silent.sendall(sent)
        assert silent.recv(1) == b""
    wait_for(lambda: not host.http._state.connections)
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
