"""The processes of `tllm-serve`: which of them may die, how they start and end."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.http_answers import SECONDS, wait_for
from tests.server.served_process import (
    LONG,
    MEDIUM,
    MODEL,
    ROOT,
    RUN,
    SHORT,
    ServedProcess,
    complete,
    is_running,
)
from tllm_spec.child_command import module_command
from tllm_spec.server.child import ENDS_SOON, FAILED, ChildSettings
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.wire import pack

ENGINE, FRONT = "engine_process", "front_process"
ENTRY_WITH_ENDLESS_IMPORTS = """
import sys, time

class Endless:
    def find_spec(self, name, *_):
        if name == f"tllm_spec.cli.{sys.argv[1]}":
            print("importing", flush=True)
            time.sleep(600)

from tllm_spec.cli import entry
sys.meta_path.insert(0, Endless())
getattr(entry, sys.argv[1])()
"""
CTRL_C_WHILE_THE_LOOP_IS_MADE = """
import asyncio.events, os, signal

make = asyncio.events.new_event_loop

def make_with_ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    return make()

asyncio.events.new_event_loop = make_with_ctrl_c
"""


@contextmanager
def stream(url: str, body: dict[str, Any] = LONG) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    path = f"{url}/v1/completions"
    with httpx.stream("POST", path, json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield lines


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """One server for the tests up to the one that ends it: to start it takes longer than they. It
    imports as the installed command does, not from its working folder, where a file hides Python's
    `queue`."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "queue.py").write_text("raise RuntimeError('this is not the queue of Python')")
    code = f"import sys; sys.path[:] = {sys.path}; {RUN}"
    flags = ("--shutdown_timeout", "600")
    with ServedProcess(folder, *flags, code=code, cwd=folder) as served:
        yield served


def test_a_front_that_dies_is_replaced_and_its_requests_are_cancelled(
    served: ServedProcess,
) -> None:
    """Also one that dies again before it serves."""
    with stream(served.url) as lines:
        (engine,), (front,) = served.pids(ENGINE), served.pids(FRONT)
        os.kill(front, signal.SIGKILL)
        with pytest.raises(httpx.RemoteProtocolError):
            list(lines)
    wait_for(lambda: served.pids(FRONT) not in ([], [front]))
    wait_for(lambda: "ended with SIGKILL and is started again" in served.text)
    (second,) = served.pids(FRONT)
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: served.pids(FRONT) not in ([], [second]))
    wait_for(lambda: "ended with SIGKILL and is started again in 1 s" in served.text)
    assert complete(served.url) == 200
    assert served.pids(ENGINE) == [engine]
    info = httpx.get(f"{served.url}/server_info").json()["internal_states"][0]
    assert info["num_requests_running"] == 0
    assert info["totals"]["requests_by_finish_reason"]["cancelled"] == 1


def test_a_signal_lets_requests_finish_and_the_status_is_zero(served: ServedProcess) -> None:
    with stream(served.url, MEDIUM) as lines:
        for child in served.pids(ENGINE) + served.pids(FRONT):  # as systemd does
            os.kill(child, signal.SIGTERM)
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "shutting down" in served.text)
        wait_for(lambda: is_refused(served.url))
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert served.wait() == 0
    assert "Traceback" not in served.text


def is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError as error:  # a reset, if it came just before
        return isinstance(error, httpx.ConnectError)
    return False


@pytest.mark.slow
def test_before_a_delayed_drain_only_health_says_that_the_server_ends(tmp_path: Path) -> None:
    with ServedProcess(tmp_path, "--drain_delay", "600", "--frontends", "2") as served:
        url = served.url
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert complete(url) == 200
        assert served.end(signal.SIGTERM) == 128 + signal.SIGTERM
    with ServedProcess(tmp_path, "--drain_delay", "0.1", "--frontends", "2") as served:
        with stream(served.url, MEDIUM) as lines:
            served.process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_refused(served.url))
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.wait() == 0


@pytest.mark.slow
def test_a_terminal_that_closes_ends_the_server_as_sigterm_does(tmp_path: Path) -> None:
    # The tests may have been started with nohup.
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {RUN}"
    with ServedProcess(tmp_path, code=code) as served:
        with stream(served.url, MEDIUM) as lines:
            served.process.send_signal(signal.SIGHUP)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert served.wait() == 0


@pytest.mark.slow
def test_a_front_that_cannot_be_started_again_ends_the_server_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    with ServedProcess(tmp_path) as served:
        url = served.url
        shutil.rmtree(tmp_path / "tmp")
        assert httpx.get(f"{url}/metrics").status_code == complete(url) == 200
        os.kill(served.pids(FRONT)[0], signal.SIGKILL)
        assert served.wait() == 1
        assert "Error: the engine's socket has been removed" in served.text
        assert "Traceback" not in served.text


@pytest.mark.slow
def test_with_nohup_a_terminal_that_closes_ends_nothing(tmp_path: Path) -> None:
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {RUN}"
    with ServedProcess(tmp_path, code=code) as served:
        url = served.url
        served.process.send_signal(signal.SIGHUP)
        assert complete(url) == 200
        assert served.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_a_front_that_dies_does_not_touch_the_streams_of_another(tmp_path: Path) -> None:
    with ServedProcess(tmp_path, "--frontends", "2") as served:
        with stream(served.url, MEDIUM) as lines:
            (idle,) = [pid for pid in served.pids(FRONT) if not num_connections(pid)]
            os.kill(idle, signal.SIGKILL)
            assert list(lines)[-2] == "data: [DONE]"
        assert served.end(signal.SIGTERM) == 0


def num_connections(pid: int) -> int:
    """Established TCP connections of a process."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and row[9] in inodes for row in rows)


@pytest.mark.slow
def test_when_the_engine_dies_streams_get_an_error_and_the_status_is_not_zero(
    tmp_path: Path,
) -> None:
    with ServedProcess(tmp_path) as served:
        url = served.url
        (front,), (engine,) = served.pids(FRONT), served.pids(ENGINE)
        with stream(url) as lines:
            os.kill(engine, signal.SIGKILL)
            events = [json.loads(line[6:]) for line in lines if line]
        assert events[-1]["error"]["message"] == "the engine's process has ended"
        assert served.wait() == 1
        assert "Error: the engine's process ended with SIGKILL" in served.text
        assert not is_running(front)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_rank_dies_the_error_of_a_stream_names_it(rank: int, tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    with ServedProcess(tmp_path, "--tp_size", "2") as served:
        state = httpx.get(f"{served.url}/server_info").json()["internal_states"][0]
        ranks = [each["process"] for each in state["ranks"]]
        assert len(ranks) == 2 and ranks[0] in served.pids(ENGINE)
        with stream(served.url) as lines:
            os.kill(ranks[rank], signal.SIGKILL)
            events = [json.loads(line[6:]) for line in lines if line]
        assert f"rank {rank}" in events[-1]["error"]["message"]
        assert served.wait() == 1
        # Open MPI has more to say after it.
        (error,) = [line for line in served.log if line.startswith("Error: ")]
        assert f"rank {rank}" in error
        wait_for(lambda: not any(map(is_running, ranks)))


@pytest.mark.slow
def test_requests_that_do_not_finish_in_time_get_an_error(tmp_path: Path) -> None:
    with ServedProcess(tmp_path, "--shutdown_timeout", "0") as served:
        with stream(served.url) as lines:
            served.process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert "the server is shutting down" in events[-1]
        assert served.wait() == 0


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once(tmp_path: Path) -> None:
    with ServedProcess(tmp_path, "--shutdown_timeout", "600") as served:
        url = served.url
        children = served.pids(ENGINE) + served.pids(FRONT)
        with stream(url):
            served.process.send_signal(signal.SIGINT)
            wait_for(lambda: "shutting down" in served.text)
            assert served.end(signal.SIGINT) == 128 + signal.SIGINT
        wait_for(lambda: not any(map(is_running, children)))
        assert "Traceback" not in served.text


def test_ctrl_c_while_the_model_is_loaded_prints_no_traceback(tmp_path: Path) -> None:
    with ServedProcess(tmp_path) as served:
        wait_for(lambda: "loading zoo:llama" in served.text)
        assert served.end(signal.SIGINT) == 128 + signal.SIGINT
        assert "Traceback" not in served.text


def test_a_front_that_dies_while_the_model_is_loaded_ends_the_server_with_a_sentence(
    tmp_path: Path,
) -> None:
    with ServedProcess(tmp_path) as served:
        wait_for(lambda: served.pids(FRONT))
        os.kill(served.pids(FRONT)[0], signal.SIGKILL)
        assert served.wait() == 1
        assert "Error: a front process ended with SIGKILL" in served.text


@pytest.mark.slow
def test_ctrl_c_while_the_event_loop_is_made_prints_no_traceback(tmp_path: Path) -> None:
    with ServedProcess(tmp_path, code=CTRL_C_WHILE_THE_LOOP_IS_MADE + RUN) as served:
        assert served.wait() == 128 + signal.SIGINT
        assert "Traceback" not in served.text and "never awaited" not in served.text


@pytest.mark.parametrize("name", ["serve", "bench"])
def test_ctrl_c_during_the_commands_imports_prints_nothing(name: str) -> None:
    command = [sys.executable, "-c", ENTRY_WITH_ENDLESS_IMPORTS, name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
        assert process.returncode == -signal.SIGINT


@pytest.mark.slow
def test_children_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with ServedProcess(tmp_path) as served:
        assert complete(served.url) == 200
        children = served.pids(ENGINE) + served.pids(FRONT)
        served.process.kill()
        wait_for(lambda: not any(map(is_running, children)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_seq_len": 100_000}, "Error: max_seq_len = 100000 exceeds the model's"),
        (
            {
                "speculative_config": {
                    "decoding_type": "Draft_Target",
                    "max_draft_len": 2,
                    "speculative_model": "/none",
                }
            },
            "'/none' is neither an existing local folder",
        ),
    ],
)
def test_an_error_of_the_engines_start_is_one_sentence_on_the_console(
    tmp_path: Path, options: dict[str, object], sentence: str
) -> None:
    with ServedProcess(tmp_path, **options) as served:
        assert served.wait() == 1
        assert sentence in served.text and "Traceback" not in served.text


@pytest.mark.slow
def test_json_logs_are_one_object_a_line_and_show_the_load(tmp_path: Path) -> None:
    flags = ("--log_format", "json", "--host", "0.0.0.0")
    with ServedProcess(tmp_path, *flags) as served:
        with stream(served.url) as lines:
            wait_for(lambda: "tokens_per_second" in served.text)
            next(lines)
        httpx.post(f"{served.url}/v1/completions", json=SHORT, timeout=60)
        assert served.end(signal.SIGTERM) == 0
    entries = [json.loads(line) for line in served.log]
    assert {"time", "level", "logger", "message", "process"} <= set.intersection(
        *(set(entry) for entry in entries)
    )
    (warning,) = [entry["message"] for entry in entries if entry["level"] == "warning"]
    assert warning == "anybody who reaches 0.0.0.0 may use this server: --api_key is not set"
    messages = [entry["message"] for entry in entries]
    phases = ("loading zoo", "loading weights", "weights took", "KV cache", "serving zoo")
    at = [next(i for i, text in enumerate(messages) if text.startswith(each)) for each in phases]
    assert at == sorted(at)
    load = next(entry for entry in entries if entry["logger"] == "tllm_spec.load")
    assert load["running"] == 1 and load["waiting"] == 0
    (access,) = [entry for entry in entries if entry.get("output_tokens") == 3]
    assert (access["path"], access["status"]) == ("/v1/completions", 200)


# What the supervisor's children do when it ends them, or has gone, before they serve.


@contextmanager
def child(module: str) -> Iterator[tuple[subprocess.Popen[str], socket.socket]]:
    """Its process, and the supervisor's end of their connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as listener:
        passed = theirs.fileno(), listener.fileno()
        command = [*module_command(f"tllm_spec.server.{module}"), *map(str, passed)]
        process = subprocess.Popen(command, pass_fds=passed, stderr=subprocess.PIPE, text=True)
        theirs.close()
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    "module", ["front_process", pytest.param("engine_process", marks=pytest.mark.slow)]
)
def test_a_child_without_a_supervisor_ends_without_a_traceback(module: str) -> None:
    with child(module) as (process, control):
        control.close()
        _, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, errors) == (FAILED, "")


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("is_announced", "is_in_one_packet"), [(False, False), (True, False), (True, True)]
)
def test_a_front_that_waits_for_an_engine_ends_when_the_server_does(
    tmp_path: Path, is_announced: bool, is_in_one_packet: bool
) -> None:
    path = str(tmp_path / "engine")
    llm, server = {"model": MODEL, "device": "cpu"}, asdict(ServerOptions())
    settings = ChildSettings(llm, MODEL, [path, path], "info", "text", server, None)
    with child("front_process") as (process, control), socket.socket(socket.AF_UNIX) as engine:
        engine.bind(path)
        engine.listen()
        engine.settimeout(SECONDS)
        packets = [pack(asdict(settings)), ENDS_SOON if is_announced else b""]
        if is_in_one_packet:
            control.sendall(b"".join(packets))
        else:
            control.sendall(packets[0])
            engine.accept()
            control.sendall(packets[1])
        if not is_announced:
            control.close()
        _, errors = process.communicate(timeout=SECONDS)
        others = [line for line in errors.splitlines() if " tllm_spec.progress: " not in line]
        assert (process.returncode, others) == (FAILED, [])
