"""Notices within milliseconds that another rank's process has ended: each rank keeps a connection
to rank 0, and the kernel closes it with the process.

A rank that ends in order says so first, and waits for the other end to say the same. Both ends of a
connection say in one line why they end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

GOODBYE = b"\n"  # an empty line
MAX_REASON = 1000  # characters


class Watch:
    """Notices that another rank has ended. `peers`: connections to other ranks, with what to call
    them. `on_loss` is called once, in a thread of its own, with the first rank that ended without a
    goodbye, and why."""

    def __init__(
        self, peers: Sequence[tuple[str, socket.socket]], on_loss: Callable[[str], None]
    ) -> None:
        self._peers = peers
        self._on_loss = on_loss
        self._lock = threading.Lock()
        self._is_over = False
        self._readers = [
            threading.Thread(target=self._read, args=peer, daemon=True) for peer in peers
        ]
        for reader in self._readers:
            reader.start()

    def close(self) -> None:
        """This rank ends in order. Returns when the others have said that they do."""
        self._send(GOODBYE)
        for reader in self._readers:
            reader.join()

    def fail(self, reason: str) -> None:
        """This rank ends because of a failure."""
        with self._lock:
            self._is_over = True
        line = " ".join(reason.split())[:MAX_REASON] or "?"
        self._send(line.encode() + b"\n")

    def _send(self, line: bytes) -> None:
        for _, connection in self._peers:
            try:
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                continue  # it has ended, too

    def _read(self, name: str, connection: socket.socket) -> None:
        data = b""
        with suppress(OSError):  # a reset connection is a closed one
            while not data.endswith(b"\n") and (piece := connection.recv(1 << 12)):
                data += piece
        if data == GOODBYE:
            return
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        why = f": {data.decode(errors='replace').strip()}" if data else " (its connection closed)"
        self._on_loss(f"{name} has ended{why}")


def listen(host: str) -> socket.socket:
    return socket.create_server((host, 0))


def accept(listener: socket.socket, token: bytes, number: int) -> list[tuple[int, socket.socket]]:
    """Connections of so many ranks. Others, which do not know the token, are dropped."""
    found: list[tuple[int, socket.socket]] = []
    while len(found) < number:
        connection, _ = listener.accept()
        head = _receive(connection, len(token) + 4)
        if head[:-4] == token:
            found.append((int.from_bytes(head[-4:], "little"), connection))
        else:
            connection.close()
    listener.close()
    return found


def connect(address: tuple[str, int], token: bytes, rank: int) -> socket.socket:
    connection = socket.create_connection(address)
    connection.sendall(token + rank.to_bytes(4, "little"))
    return connection


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data
