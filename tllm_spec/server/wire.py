"""What the front processes and the engine say to each other: lists of plain values in msgpack.

From a front: `["submit", ids, seeds, tokens, rules, options, grammar]`, `["cancel", ids, reason]`,
`["call", id, name]`, `["compile", id, kind, text]`, `["step", id, part, name, its arguments…]`.
From the engine: `["hello", limits]`, `["responses", number of unfinished requests, their tokens,
responses]` once a round, `["load", number, tokens]`, `["answer", id, value, error, whether it is
the asker's mistake]`, `["paused", mode]`, and `["down", reason]`; of an engine of several
`["kv_events", batch]` and `["worse", folder]`, its draft weights. No message can make the other
side run code.

msgspec does not serve: its decoder takes exactly one message and raises when a socket's read has
more, so each connection would need frames of its own."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgpack

from tllm_spec.executor.request import Response
from tllm_spec.outputs import Logprob, SpeculativeStats

MAX_BYTES = 1 << 30  # of one message; prompt log probabilities are the largest

# Fields of a `Response` that its front gets with the first tokens, and with the last ones.
FIRST = ("cached_tokens", "first_scheduled_time", "first_token_time")
LAST = ("finish_reason", "stop_reason", "error", "weight_versions")


def pack(message: Any) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


def new_unpacker() -> Any:
    """Collects messages from pieces of a stream: `feed` it, then iterate."""
    return msgpack.Unpacker(max_buffer_size=MAX_BYTES, strict_map_key=False)


def pack_response(response: Response, request_id: int, *, is_first: bool) -> list[Any]:
    """Most responses have new tokens only. request_id: the front's."""
    finish_reason = response.finish_reason
    if finish_reason is None and not is_first and not response.logprobs:
        return [request_id, response.token_ids]
    names = (*FIRST, *LAST) if finish_reason is not None else FIRST
    more = {name: getattr(response, name) for name in names}
    more["logprobs"] = [_plain(entry) for entry in response.logprobs]
    if response.prompt_logprobs is not None:
        more["prompt_logprobs"] = [_plain(entry) for entry in response.prompt_logprobs]
    if response.speculative is not None:
        more["speculative"] = list(asdict(response.speculative).values())
    return [request_id, response.token_ids, more]


def unpack_response(packed: Sequence[Any], index: int) -> Response:
    """index: which of a prompt's samples it is."""
    request_id, token_ids, *rest = packed
    if not rest:
        return Response(request_id, token_ids, index)
    (more,) = rest
    for name in ("logprobs", "prompt_logprobs"):
        if name in more:
            more[name] = [_logprobs(entry) for entry in more[name]]
    if stats := more.get("speculative"):
        rounds, emitted, drafted, accepted = stats
        more["speculative"] = SpeculativeStats(rounds, emitted, tuple(drafted), tuple(accepted))
    return Response(request_id, token_ids, index, **more)


def _plain(entry: dict[int, Logprob] | None) -> dict[int, tuple[float, int | None]] | None:
    return (
        None
        if entry is None
        else {token: (found.logprob, found.rank) for token, found in entry.items()}
    )


def _logprobs(entry: dict[int, Sequence[Any]] | None) -> dict[int, Logprob] | None:
    return None if entry is None else {token: Logprob(*found) for token, found in entry.items()}


# A connection to one front process, at the engine's end: any thread sends, one thread reads.


READ_BYTES = 1 << 20
# A front that does not read is cut off beyond this.
MAX_BACKLOG_BYTES = 256 << 20


class Link:
    """`on_backlog` is called when `flush` must be called once the socket can be written to."""

    def __init__(self, connection: socket.socket, on_backlog: Callable[[], None]) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.is_open = True
        self._on_backlog = on_backlog
        self._unpacker = new_unpacker()
        self._lock = threading.Lock()
        self._backlog = bytearray()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def send(self, message: Any) -> None:
        """Sends without waiting. What the socket does not take is sent later."""
        data = pack(message)
        with self._lock:
            if not self.is_open:
                return
            if self._backlog:
                self._backlog += data
                if len(self._backlog) > MAX_BACKLOG_BYTES:
                    self._cut_off()
                return
            num_sent = self._send(data)
            if num_sent == len(data):
                return
            self._backlog += memoryview(data)[num_sent:]
        self._on_backlog()

    def send_kv_events(self, batch: bytes) -> None:
        self.send(["kv_events", batch])

    def flush(self) -> None:
        """Sends what the socket takes now."""
        with self._lock:
            if self.is_open and self._backlog:
                del self._backlog[: self._send(self._backlog)]

    def read(self) -> list[Any] | None:
        """The messages that have arrived. None when the front has gone."""
        try:
            data = self.socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data:
            return None
        self._unpacker.feed(data)
        return list(self._unpacker)

    def close(self) -> None:
        with self._lock:
            self.is_open = False
            self._backlog.clear()
            self.socket.close()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader will find it closed, too
            self._cut_off()
            return len(data)

    def _cut_off(self) -> None:
        self.is_open = False
        self._backlog.clear()
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it was closed by the other end
