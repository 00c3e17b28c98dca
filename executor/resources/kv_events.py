"""KV cache events: which blocks the prefix tree has stored and removed, as routers want to know
them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import time  # noqa: TID251  # batches carry a date
from typing import Any

import msgpack

from tllm_spec.config.engine_config import KVEventsConfig
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.radix import (
    NO_BLOCK,
    NO_PAGE,
    Node,
    block_hash,
    first_parent,
    salt_hash,
)
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.lora_request import AdapterSalt, CacheSalt, name_of_version

# What the prefix tree gains and loses, as vLLM's KV events (of version 0.26.0).
#
# A page counts as stored when a request with its tokens and one more would reuse it. A page of
# which a group with a span has lost what the next query sees is not stored then, although it is in
# the tree and although pages after it may be stored.


Event = dict[str, Any]

CLEARED: Event = {"type": "AllBlocksCleared"}
MEDIUM = "GPU"  # of the device's memory, as in vLLM also on a CPU


class KVEventLog:
    """Events since the last `take`, oldest first.

    is_current: whether a root is of the present version. spans: by group; the keys that its queries
    see, None for all up to their own. lookahead: as of the tree. Nodes that differ in the token
    after their page only are one page."""

    def __init__(
        self,
        page_size: int,
        is_current: Callable[[Node], bool],
        lookahead: int = 0,
        spans: Sequence[KeySpan | None] = (None,),
    ) -> None:
        self._page_size = page_size
        self._is_current = is_current
        self._key_len = page_size + lookahead
        self._spans = [(group, span) for group, span in enumerate(spans) if span is not None]
        self._hashes: dict[Node, int] = {}  # of the full pages in the tree
        self._stored: set[Node] = set()
        self._num_nodes: dict[int, int] = {}  # stored ones, by hash
        self._events: list[Event] = [CLEARED]  # what an engine before this one had stored

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def present(self) -> list[Event]:
        """The events that make an empty cache this one, parents first."""
        log = KVEventLog(self._page_size, self._is_current)
        log._hashes, log._spans = self._hashes, self._spans
        for node in self._hashes:  # in the order in which they came
            if node in self._stored:
                log._store(node)
        return log.take()

    def changed(self, node: Node) -> None:
        """The node is new, or its pages in groups with a span are others than before."""
        if len(node.key) < self._key_len:
            return
        if node not in self._hashes:
            if not self._may_be_reused(node):
                return
            parent = self._parent_hash(node)
            self._hashes[node] = block_hash(parent, node.key[: self._page_size])
        if self._spans:
            self._look_again(node)
        else:
            self._store(node)

    def left(self, node: Node) -> None:
        """The node has left the tree."""
        if node in self._hashes:
            self._remove(node)
            del self._hashes[node]

    def clear(self) -> None:
        """Notes that nothing that is in the tree is reused any more."""
        self._hashes.clear()
        self._stored.clear()
        self._num_nodes.clear()
        self._events = [CLEARED]

    def _may_be_reused(self, node: Node) -> bool:
        """Whether a new node is below a root of the present version."""
        parent = node.parent
        assert parent is not None
        return parent in self._hashes or (parent.parent is None and self._is_current(parent))

    def _look_again(self, changed: Node) -> None:
        """Records what is stored or removed now at the node, and at those after it whose next query
        sees its page."""
        number = _depth(changed)
        pending = [(changed, number)]
        while pending:
            node, depth = pending.pop()
            position = depth * self._page_size
            firsts = [
                (group, span.first_key(position) // self._page_size) for group, span in self._spans
            ]
            if node is not changed and all(first >= number for _, first in firsts):
                continue
            if _has_pages(node, depth, firsts):
                self._store(node)
            else:
                self._remove(node)
            full = (child for child in node.children.values() if child in self._hashes)
            pending += [(child, depth + 1) for child in full]

    def _store(self, node: Node) -> None:
        if node in self._stored:
            return
        self._stored.add(node)
        own = self._hashes[node]
        number = self._num_nodes[own] = self._num_nodes.get(own, 0) + 1
        if number > 1:
            return
        absent = self._absent_before(node) if self._spans else []
        for ancestor in reversed(absent):  # or no reader would know their tokens
            self._announce(ancestor)
        self._announce(node)
        for ancestor in absent:
            self._withdraw(self._hashes[ancestor])

    def _remove(self, node: Node) -> None:
        if node not in self._stored:
            return
        self._stored.remove(node)
        own = self._hashes[node]
        self._num_nodes[own] -= 1
        if not self._num_nodes[own]:
            del self._num_nodes[own]
            self._withdraw(own)

    def _absent_before(self, node: Node) -> list[Node]:
        """The nodes before this one that are not stored, up to one that is."""
        absent, parent = [], node.parent
        while parent is not None and (own := self._hashes.get(parent)) is not None:
            if own in self._num_nodes:
                break
            absent.append(parent)
            parent = parent.parent
        return absent

    def _announce(self, node: Node) -> None:
        own, parent, tokens = self._hashes[node], self._parent_hash(node), node.key
        last = self._events[-1] if self._events else CLEARED
        if last["type"] == "BlockStored" and last["block_hashes"][-1] == parent:
            last["block_hashes"].append(own)
            last["token_ids"].extend(tokens[: self._page_size])
            if "extra_keys" in last:
                last["extra_keys"].append(last["extra_keys"][0])
            return
        event: Event = {
            "type": "BlockStored",
            "block_hashes": [own],
            "parent_block_hash": parent if node.parent in self._hashes else None,
            "token_ids": list(tokens[: self._page_size]),
            "block_size": self._page_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": None,
        }
        if isinstance(salt := _salt_of(node), AdapterSalt):
            event["lora_name"] = name_of_version(salt.adapter)
        if salt is not None:
            event["extra_keys"] = [[salt_hash(salt)]]
        self._events.append(event)

    def _withdraw(self, own: int) -> None:
        last = self._events[-1] if self._events else CLEARED
        if last["type"] == "BlockRemoved":
            last["block_hashes"].append(own)
        else:
            self._events.append({"type": "BlockRemoved", "block_hashes": [own], "medium": MEDIUM})

    def _parent_hash(self, node: Node) -> int:
        assert node.parent is not None
        return self._hashes.get(node.parent, NO_BLOCK) or first_parent(node.parent.salt)


def _depth(node: Node) -> int:
    """Pages of the path that ends with the node."""
    depth = 0
    while node.parent is not None:
        node, depth = node.parent, depth + 1
    return depth


def _salt_of(node: Node) -> CacheSalt:
    while node.parent is not None:
        node = node.parent
    return node.salt


def _has_pages(node: Node, depth: int, firsts: Sequence[tuple[int, int]]) -> bool:
    """Whether the path that ends with the node has the pages from each group's first one on."""
    lowest = min(first for _, first in firsts)
    for index in range(depth - 1, lowest - 1, -1):
        if any(first <= index and node.pages[group] == NO_PAGE for group, first in firsts):
            return False
        assert node.parent is not None
        node = node.parent
    return True


# Sends the KV events of the target's cache, a batch for each change of rounds.


Sink = Callable[[bytes], None]


class KVEvents(ResourceManager):
    """Packs what the log has and gives it to every sink: `[seconds since 1970, events, rank]` in
    msgpack. In the executor's thread."""

    def __init__(self, log: KVEventLog, data_parallel_rank: int = 0) -> None:
        self._log = log
        self._rank = data_parallel_rank
        self._sinks: list[Sink] = []

    def add_sink(self, sink: Sink) -> None:
        """Adds a sink, which first gets the events that make an empty cache the current one."""
        self.send()
        sink(self._pack(self._log.present()))
        self._sinks.append(sink)

    def remove_sink(self, sink: Sink) -> None:
        self._sinks.remove(sink)

    def send(self) -> None:
        if events := self._log.take():
            payload = self._pack(events)
            for sink in self._sinks:
                sink(payload)

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        self.send()

    def update_resources(self, batch: ScheduledBatch) -> None:
        self.send()

    def free_resources(self, request: LlmRequest) -> None:
        self.send()

    def _pack(self, events: list[Event]) -> bytes:
        packed: bytes = msgpack.packb([time(), events, self._rank])
        return packed


# Publishes batches of KV events over ZeroMQ, as vLLM does: on a PUB socket with sequence numbers,
# and from a ROUTER socket those that a subscriber has missed.
#
# A published message has three frames: the topic, the number (8 bytes, big-endian, from 0) and the
# batch. A subscriber's DEALER socket sends an empty frame and the first number that it wants; it
# gets a message of an empty frame, number and batch for each that is left, and then one of the
# number -1 with an empty batch.


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
        own = context, sockets, config
        thread = threading.Thread(target=_publish, args=own, name="tllm-kv-events", daemon=True)
        thread.start()
        weakref.finalize(self, _end, self._outlet, thread)

    def publish(self, payload: bytes) -> None:
        """Never waits for subscribers."""
        self._outlet.send(payload)


def _publish(context: Any, sockets: tuple[Any, Any, Any], config: KVEventsConfig) -> None:
    """Publishes payloads, and answers subscribers, until an empty payload comes."""
    zmq, topic, numbers = _zmq(), config.topic.encode(), count()
    inlet, published, replay = sockets
    kept = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)
    poller = zmq.Poller()
    for socket in (inlet, replay):
        if socket is not None:
            poller.register(socket, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if replay in ready:
            _answer(replay, kept)
        if inlet in ready:
            payload = inlet.recv()
            if not payload:
                break
            number = next(numbers).to_bytes(NUMBER_BYTES, "big")
            published.send_multipart((topic, number, payload))
            kept.append((number, payload))
    context.destroy(linger=0)


def _answer(replay: Any, kept: Iterable[tuple[bytes, bytes]]) -> None:
    """Sends a subscriber what it has missed."""
    frames = replay.recv_multipart()
    if len(frames) != 3 or len(frames[2]) != NUMBER_BYTES:
        return  # no subscriber sends that
    client, _, first = frames
    for number, payload in kept:
        if number >= first:
            replay.send_multipart((client, b"", number, payload))
    replay.send_multipart((client, b"", END, b""))


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
