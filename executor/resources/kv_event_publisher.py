"""Publishes batches of KV events over ZeroMQ, as vLLM does: on a PUB socket with sequence numbers,
and from a ROUTER socket those that a subscriber has missed.

A published message has three frames: the topic, the number (8 bytes, big-endian, from 0) and the
batch. A subscriber's DEALER socket sends an empty frame and the first number that it wants; it gets
a message of an empty frame, number and batch for each that is left, and then one of the number -1
with an empty batch."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from itertools import count
from typing import Any

from tllm_spec.config.kv_events_config import KVEventsConfig

NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
HIGH_WATER_MARK = 100_000  # messages that a slow subscriber may leave; then it misses some


class KVEventPublisher:
    """Has a thread of its own, which ends with the object. Raises ValueError for endpoints that
    cannot be used."""

    def __init__(self, config: KVEventsConfig) -> None:
        zmq = _zmq()
        context = zmq.Context()
        try:
            sockets = _sockets(context, config)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            raise ValueError(
                f"kv_events_config: {config.endpoint!r} and {config.replay_endpoint!r} cannot be "
                f"used: {error}"
            ) from error
        self._outlet = context.socket(zmq.PAIR)
        self._outlet.connect("inproc://batches")
        thread = _PublisherThread(context, sockets, config)
        thread.start()
        weakref.finalize(self, _end, self._outlet, thread)

    def publish(self, payload: bytes) -> None:
        """Never waits for subscribers."""
        self._outlet.send(payload)


class _PublisherThread(threading.Thread):
    def __init__(self, context: Any, sockets: tuple[Any, Any, Any], config: KVEventsConfig) -> None:
        super().__init__(name="tllm-kv-events", daemon=True)
        self._context = context
        self._inlet, self._published, self._replay = sockets
        self._topic = config.topic.encode()
        self._numbers = count()
        self._kept = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)

    def run(self) -> None:
        """Publishes payloads, and answers subscribers, until an empty payload comes."""
        zmq = _zmq()
        poller = zmq.Poller()
        for socket in (self._inlet, self._replay):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
            if self._inlet in ready:
                payload = self._inlet.recv()
                if not payload:
                    break
                number = next(self._numbers).to_bytes(NUMBER_BYTES, "big")
                self._published.send_multipart((self._topic, number, payload))
                self._kept.append((number, payload))
        self._context.destroy(linger=0)

    def _answer(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
            return  # no subscriber sends that
        client, _, first = frames
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((client, b"", number, payload))
        self._replay.send_multipart((client, b"", END, b""))


def _sockets(context: Any, config: KVEventsConfig) -> tuple[Any, Any, Any]:
    """The sockets that batches come from, that they are published on, and that subscribers ask for
    earlier ones; None instead of the last if nothing is kept."""
    zmq = _zmq()
    inlet, published, replay = context.socket(zmq.PAIR), context.socket(zmq.PUB), None
    inlet.bind("inproc://batches")
    published.set_hwm(HIGH_WATER_MARK)
    if config.binds:
        published.bind(config.endpoint)
    else:
        published.connect(config.endpoint)
    if config.replay_endpoint is not None:
        replay = context.socket(zmq.ROUTER)
        replay.bind(config.replay_endpoint)
    return inlet, published, replay


def _end(outlet: Any, thread: threading.Thread) -> None:
    outlet.send(b"")
    thread.join()


def _zmq() -> Any:
    try:
        import zmq  # heavy, and an extra
    except ImportError as error:
        raise ValueError(
            "kv_events_config needs the package pyzmq: pip install 'tllm_spec[events]'"
        ) from error
    return zmq
