"""A server that shuts down lets requests finish, until a deadline."""

import asyncio
import itertools
import json
import logging
import re
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from tests.server.fake_llm import MODEL, SLOW_PROMPT, FakeLLM
from tests.server.hosted import Host, hosted
from tests.server.http_answers import events_of, wait_for
from tests.server.raw_client import (
    ask_for_a_long_answer,
    completion,
    connect,
    head,
    read_until,
    until_closed,
)
from tests.server.served_process import OPTIONS
from tllm_spec import LLM, SamplingParams
from tllm_spec.executor.py_executor import Load
from tllm_spec.server import engine_process
from tllm_spec.server.app import OpenAIServer
from tllm_spec.server.child import JsonFormatter, configure_logs
from tllm_spec.server.engine_process import EngineLoop, log_load
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
            httpx.get(f"{host.url}/health")
        host.llm.aborted.add(0)  # the slow answer ends
        assert until_closed(client).endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert host.ended.wait(60)
    host.join()
    copy.close()


def test_a_client_that_reads_late_gets_its_whole_answer_from_a_server_that_ends() -> None:
    host = host_with(600)
    with ask_for_a_long_answer(host.listener) as client, connect(host.address) as idle:
        host.stop()
        assert until_closed(idle) == b""
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


# What the server logs: one format, and a line about the load.


def test_a_json_line_has_the_fields_of_the_record_and_its_exception() -> None:
    try:
        raise KeyError("k")
    except KeyError:
        record = logging.LogRecord(
            "tllm_spec.x", logging.ERROR, "", 0, "no %s: %d", ("a\nb", 3), sys.exc_info()
        )
    record.fields = {"running": 2}
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["message"] == "no a\nb: 3" and entry["level"] == "error"
    assert entry["running"] == 2 and "KeyError" in entry["exception"]
    assert entry["time"].endswith("Z")


def test_a_line_of_one_of_several_processes_says_which(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    for log_format in ("text", "json"):
        logging.root.handlers.clear()
        configure_logs("info", log_format, "engine 1")
        logging.getLogger("tllm_spec.x").error("here")
    text, line = capfd.readouterr().err.splitlines()
    assert text.endswith(" ERROR engine 1 tllm_spec.x: here")
    assert json.loads(line)["part"] == "engine 1"


def test_the_load_is_what_happened_since_the_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "tllm_spec.load")
    first, *loads = (
        Load(0, 0, None, 0, 0),
        Load(3, 4, 2, request_rounds=100, emitted_tokens=250),
        Load(3, 0, 2, request_rounds=100, emitted_tokens=250),
        Load(0, 0, 2, request_rounds=100, emitted_tokens=250),
    )
    for load, seconds in zip(loads, (2.0, 1.0, 1.0), strict=True):
        log_load(first, load, seconds)
        first = load
    assert caplog.messages == [
        "125 tokens/s, 3 running, 4 waiting, acceptance length 2.5, draft length 2",
        "0 tokens/s, 3 running, 0 waiting, acceptance length -, draft length 2",
    ]


def test_a_line_of_load_does_not_spread_tokens_over_idle_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests come in seconds 50 and 51, and in 90. A load is asked for at the end of a second in
    which there were some, and of the next."""
    busy, ends = {51: 40, 52: 100, 91: 130}, itertools.count(1)
    port: Any = SimpleNamespace(num_unfinished=0, num_submitted=0, send_load=lambda: None)
    clock, tokens = 0.0, 0

    async def sleep(seconds: float) -> None:
        nonlocal clock, tokens
        clock = next(ends)
        tokens = busy.get(int(clock), tokens)
        port.num_unfinished = int(clock in busy)
        if clock == 100:
            raise TimeoutError

    def ask() -> Future[Load]:
        answer: Future[Load] = Future()
        answer.set_result(Load(port.num_unfinished, 0, 3, tokens // 4, tokens))
        return answer

    caplog.set_level(logging.INFO, "tllm_spec.load")
    monkeypatch.setattr(engine_process, "monotonic", lambda: clock)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with socket.socket() as listener, pytest.raises(TimeoutError):
        asyncio.run(EngineLoop(port, listener, ask)._report_load())
    rates = [line.partition(",")[0] for line in caplog.messages]
    assert rates == ["40 tokens/s", "60 tokens/s", "30 tokens/s"]


# The wall clock may jump while the server runs: only times that people read depend on it.


HOUR, DAY = 3600, 86400
BODY: dict[str, Any] = {
    "model": MODEL,
    "prompt": "def f(",
    "max_tokens": 40,
    "ignore_eos": True,
    "temperature": 0,
}
SPECULATION = {"decoding_type": "NGram", "max_draft_len": 3, "adaptive": {"strategy": "cost_model"}}


def let_jump(monkeypatch: pytest.MonkeyPatch, offsets: Iterator[float]) -> list[float]:
    """Each reading of the wall clock has the next offset. The list grows with each."""
    read: list[float] = []
    real = time.time  # noqa: TID251  # it is replaced

    def jumping() -> float:
        read.append(real() + next(offsets))
        return read[-1]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    return read


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("zoo:llama", **OPTIONS, speculative_config=SPECULATION) as llm:
        yield llm


@pytest.fixture(scope="module")
def text(llm: LLM) -> str:
    """Generated while the clock is right."""
    params = SamplingParams(max_tokens=BODY["max_tokens"], ignore_eos=True, temperature=0)
    return llm.generate(BODY["prompt"], params, use_tqdm=False).outputs[0].text


@pytest.fixture(scope="module")
def url(llm: LLM) -> Iterator[str]:
    options = ServerOptions(request_timeout=HOUR / 2, shutdown_timeout=HOUR / 2)
    with hosted(llm, options) as url:  # type: ignore[arg-type]  # any engine is served
        yield url


def test_texts_durations_and_time_outs_do_not_depend_on_the_wall_clock(
    text: str, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = let_jump(monkeypatch, itertools.cycle([0, -HOUR, DAY]))
    caplog.set_level(logging.INFO, "tllm_spec.access")
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(partial(send, url), [True, False, True, False]))
    for answer in answers[::2]:
        *events, end = events_of(answer)
        assert end == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in events) == text
    assert [answer.json()["choices"][0]["text"] for answer in answers[1::2]] == [text] * 2
    assert len(read) > 4, "each answer has the date on which it was created"
    records = httpx.get(f"{url}/perf_metrics").json()
    assert len(records) == 4
    for record in records:
        times = list(record["perf_metrics"]["timing_metrics"].values())
        assert times == sorted(times) and times[-1] - times[0] < HOUR / 2
    sums = re.findall(r"^\w+_seconds_sum (\S+)$", httpx.get(f"{url}/metrics").text, re.MULTILINE)
    assert len(sums) >= 4 and all(0 <= float(seconds) < HOUR for seconds in sums)
    wait_for(lambda: len(logged_seconds(caplog)) >= 4)
    assert all(0 <= seconds < HOUR / 2 for seconds in logged_seconds(caplog))


def logged_seconds(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The durations in the access log."""
    records: list[Any] = [each for each in caplog.records if each.name == "tllm_spec.access"]
    return [record.fields["seconds"] for record in records]


def send(url: str, stream: bool) -> httpx.Response:
    answer = httpx.post(f"{url}/v1/completions", json=BODY | {"stream": stream}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_time_out_ends_a_request_although_the_wall_clock_goes_back(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    let_jump(monkeypatch, itertools.count(0, -HOUR))
    body = {"model": MODEL, "prompt": SLOW_PROMPT, "stream": stream}
    with hosted(FakeLLM(), ServerOptions(request_timeout=0.05, shutdown_timeout=5)) as url:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert "took longer than 0.05 s" in answer.text
