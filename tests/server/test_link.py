"""The engine's end of a connection to a front."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tllm_spec.server import engine_process as engine_loop
from tllm_spec.server import wire as link
from tllm_spec.server.engine_process import EngineLoop
from tllm_spec.server.wire import new_unpacker, pack


def test_a_front_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_BACKLOG_BYTES", 1 << 20)
    ours, theirs = socket.socketpair()
    woken: list[bool] = []
    slow = link.Link(ours, lambda: woken.append(True))
    while slow.is_open:
        slow.send(b"x" * (1 << 16))
    assert woken and not slow.has_backlog
    assert slow.read() is None
    slow.close()
    theirs.close()


def test_what_a_socket_does_not_take_at_once_arrives_in_order() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = link.Link(ours, lambda: None), link.Link(theirs, lambda: None)
    for number in range(200):
        sender.send([number, b"x" * 10_000])
    assert sender.has_backlog
    numbers: list[int] = []
    while len(numbers) < 200:
        sender.flush()
        numbers += [number for number, _ in receiver.read() or ()]
    assert numbers == list(range(200)) and not sender.has_backlog
    sender.close()
    assert receiver.read() is None
    receiver.close()


def test_what_is_left_at_the_end_is_sent_in_however_many_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Port:
        num_unfinished = num_submitted = 0

        def add(self, front: link.Link) -> None:
            front.send(message)
            loop.stop()

    send, message = link.Link._send, b"x" * 10_000
    monkeypatch.setattr(link.Link, "_send", lambda self, data: send(self, data[:100]))
    monkeypatch.setattr(engine_loop, "LAST_SECONDS", 300.0)
    path, port = str(tmp_path / "engine"), Port()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as front:
        listener.bind(path)
        listener.listen()
        front.settimeout(60)
        front.connect(path)
        unused: Any = None
        loop = EngineLoop(port, listener, unused)  # type: ignore[arg-type]  # it has what is used
        running = threading.Thread(target=loop.run)
        running.start()
        unpacker = new_unpacker()
        unpacker.feed(front.makefile("rb").read(len(pack(message))))
        running.join()
    assert list(unpacker) == [message]
