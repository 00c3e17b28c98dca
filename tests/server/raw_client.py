"""HTTP by hand, for what no well-behaved client sends."""

import json
import socket
from typing import Any

from tests.server.fake_llm import MODEL

Address = tuple[str, int]


def head(path: str, length: int, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {length}", "", ""]
    return "\r\n".join(lines).encode()


def completion(prompt: Any, **body: Any) -> bytes:
    """A whole request for `/v1/completions`."""
    text = json.dumps({"model": MODEL, "prompt": prompt, **body}).encode()
    return head("/v1/completions", len(text)) + text


def ask_for_a_long_answer(listener: socket.socket) -> socket.socket:
    """A client that has read the beginning of an answer that does not fit the system's buffers."""
    text = json.dumps({"prompt": "a " * 30_000}).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    client.settimeout(60)
    client.connect(listener.getsockname())
    client.sendall(head("/tokenize", len(text)) + text)
    read_until(client, b'"tokens":[')
    return client


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, timeout=60)


def until_closed(connection: socket.socket) -> bytes:
    """What arrives until the server closes the connection."""
    received = b""
    try:
        while data := connection.recv(1 << 16):
            received += data
    except ConnectionResetError:
        pass
    return received


def status_of(received: bytes) -> int:
    return int(received.split(b" ", 2)[1])


def read_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        data = connection.recv(1 << 16)
        assert data, received
        received += data
    return received
