"""A rank that shuts down waits for the others to say that they do, and notices one that is lost."""

from __future__ import annotations

import socket
import threading

import pytest

from tllm_spec.distributed.process_group import GOODBYE, Watch

LIMIT_SECONDS = 60


@pytest.mark.parametrize(
    ("said", "losses"),
    [
        (GOODBYE, []),
        (b"", ["rank 1 has ended (its connection closed)"]),
        (b"it has failed\n", ["rank 1 has ended: it has failed"]),
    ],
)
def test_a_rank_that_ends_before_it_has_parted_is_lost(said: bytes, losses: list[str]) -> None:
    found: list[str] = []
    own, other = socket.socketpair()
    with own, other:
        watch = Watch([("rank 1", own)], found.append)
        closing = threading.Thread(target=watch.close, daemon=True)
        closing.start()
        assert other.recv(1) == GOODBYE and other.recv(1) == b""
        assert closing.is_alive() and not found
        other.sendall(said)
        other.shutdown(socket.SHUT_WR)
        closing.join(LIMIT_SECONDS)
        assert not closing.is_alive()
    assert found == losses


def test_after_a_failure_of_its_own_a_rank_waits_for_nobody() -> None:
    found: list[str] = []
    own, other = socket.socketpair()
    with own, other:
        Watch([("rank 1", own)], found.append).fail("no\nroom")
        with other.makefile("rb") as said:
            assert said.read() == b"no room\n"
    assert not found
