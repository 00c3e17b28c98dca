"""A front process' memory stays bounded whatever clients send."""

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.http_answers import SECONDS, wait_for
from tests.server.served_process import MODEL, OPTIONS, ROOT, RUN, ServedProcess, complete
from tllm_spec.outputs import CompletionOutput, RequestMetrics, RequestOutput
from tllm_spec.server.child import ChildSettings, configure_logs
from tllm_spec.server.histograms import LATENCY, NUM_BYTES, Histograms
from tllm_spec.server.supervisor import ServeError, Supervisor

MIB = 1 << 20
LIMIT = 32 * MIB
AT_ONCE = 6

Body = Callable[[], bytes]


def memory(pid: int, name: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (the most so far)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"no {name}")


def keys() -> bytes:
    return (
        b'{"model": "zoo:llama", '
        + b", ".join(b'"k%d": {}' % i for i in range(MIB // 6 - 9))
        + b"}"
    )


def token_ids() -> bytes:
    return b'{"model": "zoo:llama", "prompt": [' + b"123456789," * (MIB // 2 - 100) + b"1]}"


def long_text() -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a b" * (9 * MIB)}).encode()


def wide_text() -> bytes:
    """One character makes Python store all of them with four bytes each."""
    return json.dumps({"model": MODEL, "prompt": "a b" * (2 * MIB) + "\\ud83d\\ude00"}).encode()


def too_wide_text() -> bytes:
    return json.dumps({"model": MODEL, "prompt": "a b" * (9 * MIB) + "😀"}).encode()


def long_chat() -> bytes:
    message = {"role": "user", "content": "a b" * (9 * MIB)}
    return json.dumps({"model": MODEL, "messages": [message]}).encode()


def many_messages() -> bytes:
    messages = [{"rol": "user"}] * (MIB // 10)
    return json.dumps({"model": MODEL, "messages": messages}).encode()


def deep() -> bytes:
    return b"[" * (MIB // 2 - 1)


def too_large() -> bytes:
    return b" " * (LIMIT + MIB)


@pytest.mark.slow
def test_hostile_bodies_take_at_most_half_as_much_again_as_an_idle_front(tmp_path: Path) -> None:
    with ServedProcess(tmp_path) as served:
        url = served.url
        (front,) = served.pids("front_process")
        assert complete(url) == 200
        idle = memory(front, "VmRSS")
        statuses: set[int] = set()
        lengths: set[int] = set()
        peaks: dict[str, int] = {}

        def attack(path: str, body: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            try:
                answer = httpx.post(f"{url}{path}", content=body, headers=headers, timeout=120)
            except httpx.TransportError:
                return  # cut off while it was sent
            statuses.add(answer.status_code)
            lengths.add(len(answer.content))

        texts = (long_text, wide_text, too_wide_text)
        for make in (keys, token_ids, *texts, long_chat, many_messages, deep, too_large):
            is_chat = make in (long_chat, many_messages)
            path = "/v1/chat/completions" if is_chat else "/v1/completions"
            body = make()
            threads = [threading.Thread(target=attack, args=(path, body)) for _ in range(AT_ONCE)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            peaks[make.__name__] = memory(front, "VmHWM") // MIB
        assert statuses <= {400, 413, 503} and max(lengths) < 20_000
        assert complete(url) == 200
        assert memory(front, "VmHWM") <= 1.5 * idle + LIMIT, (idle // MIB, peaks)
        assert served.pids("front_process") == [front]


# A server goes on when the disk is full. `/dev/full` refuses every byte, as such a disk does.


FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason=f"needs {FULL}")


@pytest.fixture
def output() -> RequestOutput:
    metrics = RequestMetrics(1.0, first_scheduled_time=2.0, finished_time=4.0)
    return RequestOutput(0, None, [1], [CompletionOutput(0)], metrics, finished=True)


@pytest.mark.slow
@needs_full
def test_a_server_whose_log_is_on_a_full_disk_answers_and_ends_with_status_0(
    tmp_path: Path,
) -> None:
    path = tmp_path / "options.yaml"
    path.write_text(json.dumps(OPTIONS))  # JSON is YAML, too
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", RUN, MODEL, "--port", str(port), "--config", str(path)]
    environment = os.environ | {"PYTHONUNBUFFERED": ""}  # what stays in a buffer fails at the end
    with (
        FULL.open("w") as full,
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=full) as process,
    ):
        try:
            wait_for(lambda: process.poll() is not None or is_listening(port))
            assert httpx.get(f"{url}/health", timeout=SECONDS).status_code == 200
            assert [complete(url) for _ in range(3)] == [200] * 3
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=SECONDS) == 0
        finally:
            process.kill()


def is_listening(port: int) -> bool:
    with socket.socket() as client:  # a client of HTTP costs more than all of the server's start
        return client.connect_ex(("127.0.0.1", port)) == 0


@needs_full
def test_a_log_line_that_cannot_be_written_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    log = tmp_path / "log"
    with FULL.open("w") as full, log.open("w") as file:
        monkeypatch.setattr(sys, "stderr", full)
        configure_logs("info", "text")
        logging.getLogger("tllm_spec").error("lost" * 10_000)
        os.dup2(file.fileno(), full.fileno())  # there is space again
        logging.getLogger("tllm_spec").error("kept")
    assert "lost" not in log.read_text() and log.read_text().endswith(" tllm_spec: kept\n")
    assert log.read_text().count("\n") == 1, "no report of the failed write either"


@needs_full
def test_a_front_whose_histograms_cannot_be_written_has_them_in_memory(
    tmp_path: Path, output: RequestOutput, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"histograms-{os.getpid()}"
    path.symlink_to(FULL)
    histograms = Histograms(tmp_path)
    assert "No space left on device" in caplog.text
    histograms.add(output, is_streamed=False)
    assert histograms.read()[LATENCY].sum == 3
    assert not path.is_symlink() and FULL.exists(), "other fronts would read it"


def test_the_file_of_histograms_has_its_space_from_the_start(
    tmp_path: Path, output: RequestOutput
) -> None:
    histograms = Histograms(tmp_path)
    (path,) = tmp_path.iterdir()
    # Of a file with holes, a full disk would end the process (SIGBUS) at the first figure.
    assert path.stat().st_blocks * 512 >= NUM_BYTES
    histograms.add(output, is_streamed=False)
    assert histograms.read()[LATENCY].sum == 3


def test_no_space_for_the_engines_socket_is_one_sentence_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*arguments: object, **options: object) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    settings = ChildSettings({}, MODEL, [], "info", "text", {"dp_size": 1}, None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        supervisor = Supervisor(settings, listener, 1, 0)
        with pytest.raises(ServeError, match=r"socket .* No space left on device"):
            asyncio.run(supervisor.run())
