"""The engine's end of a connection to a front."""

import socket

import pytest

from tllm_spec.server import link


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
