"""What the supervisor's children do when it ends them, or has gone, before they serve."""

import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.server.http_answers import SECONDS
from tests.server.served_process import MODEL
from tllm_spec.child_command import module_command
from tllm_spec.server.child import ENDS_SOON, FAILED, ChildSettings
from tllm_spec.server.options import ServerOptions
from tllm_spec.server.wire import pack


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


@pytest.mark.parametrize("module", ["front_process", "engine_process"])
def test_a_child_without_a_supervisor_ends_without_a_traceback(module: str) -> None:
    with child(module) as (process, control):
        control.close()
        _, errors = process.communicate(timeout=SECONDS)
        assert (process.returncode, errors) == (FAILED, "")


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
