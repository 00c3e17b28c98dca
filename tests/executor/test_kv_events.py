"""KV events against the prefix tree: what a reader knows is what the cache would reuse."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from time import sleep
from typing import Any

import msgpack
import pytest
import zmq

from tests.executor.kv_event_reader import Cleared, Reader
from tests.executor.one_group import cache_of
from tests.executor.paged_cache_driver import RandomUse
from tests.executor.test_paged_cache import SPANS
from tllm_spec import LLM, SamplingParams
from tllm_spec.config.engine_config import KVEventsConfig
from tllm_spec.executor.resources.kv_events import KVEventPublisher, KVEvents
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.resources.radix import Node, block_hashes, salt_hash

Prefix = tuple[str | None, tuple[int, ...]]


def paths_of(cache: PagedCache) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """The salt of each node in the tree, and all tokens up to the end of its key."""
    size = cache.page_size

    def below(node: Node, tokens: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for key, child in node.children.items():
            yield tokens + key
            yield from below(child, tokens + key[:size])

    for (_, salt), root in list(cache._tree._roots.items()):
        for path in below(root, ()):
            yield salt, path


def reusable(cache: PagedCache) -> set[Prefix]:
    """The prefixes of whole pages that a request with these tokens and one more would reuse."""
    found = set()
    for salt, path in paths_of(cache):
        length = len(path) - cache.lookahead
        if length % cache.page_size:
            continue
        prompt = [*path[:length], path[length] if cache.lookahead else -1]
        nodes = cache._find_prefix(prompt, cache._tree.root_of(salt)).nodes
        if len(nodes) * cache.page_size == length:
            found.add((None if salt is None else salt_hash(salt), path[:length]))
    return found


def check_reader(reader: Reader, cache: PagedCache) -> None:
    assert reader.prefixes() == reusable(cache)
    for own in reader.stored:
        block = reader.known[own]
        if block.salt is None:  # a router computes the same hashes of a prompt
            prompt = [*reader._path(own), 0]
            assert block_hashes(prompt, cache.page_size, None)[-1] == own


@pytest.mark.covering
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 24), (2, 13), (4, 9)])
@pytest.mark.parametrize("name", ["all keys", *SPANS])
def test_a_reader_always_knows_what_the_cache_would_reuse(
    name: str, page_size: int, num_pages: int, lookahead: int
) -> None:
    options: dict[str, Any] = {"spans": SPANS.get(name, [None]), "lookahead": lookahead}
    use = RandomUse(page_size, num_pages, partial_reuse=True, **options)
    cache = use.driver.cache
    events, early, late = KVEvents(cache.log_events()), Reader(), Reader()
    events.add_sink(early.read)
    num_stored = 0
    for number in range(400):
        use.step()
        events.send()
        check_reader(early, cache)
        num_stored = max(num_stored, len(early.stored))
        if number == 200:
            events.add_sink(late.read)
            assert late.stored == early.stored
    assert late.stored == early.stored and num_stored > 2
    assert len(early.known) > 5


def run(cache: PagedCache, seq_id: int, tokens: list[int], salt: str | None = None) -> None:
    cache.add_sequence(seq_id, tokens, salt)
    assert cache.extend(seq_id, len(tokens))
    cache.free(seq_id, tokens)


def test_salted_pages_carry_the_hash_of_their_salt_and_share_no_hash_with_others() -> None:
    cache, reader, tokens = cache_of(9, 2, lambda *pages: None), Reader(), [5, 6, 7, 8]
    events = KVEvents(cache.log_events(), data_parallel_rank=3)
    payloads: list[bytes] = []
    events.add_sink(payloads.append)
    run(cache, 1, tokens)
    run(cache, 2, tokens, "a")
    events.send()
    batches = [reader.read(payload) for payload in payloads]
    assert [batch.data_parallel_rank for batch in batches] == [3] * len(batches)
    key, path = salt_hash("a"), tuple(tokens)
    assert reader.prefixes() == {(salt, path[:end]) for salt in (None, key) for end in (2, 4)}
    assert b"a" not in key.encode() or len(key) == 16
    check_reader(reader, cache)
    assert set(block_hashes([*tokens, 0], 2, "a")) < reader.stored


def test_what_older_weights_have_computed_is_not_reported() -> None:
    cache, reader = cache_of(12, 2, lambda *pages: None), Reader()
    events = KVEvents(cache.log_events())
    events.add_sink(reader.read)
    run(cache, 1, [1, 2, 3, 4])
    cache.add_sequence(2, [1, 2, 3])
    assert cache.extend(2, 6)
    events.send()
    assert len(reader.stored) == 2
    cache.start_version(1)
    events.send()
    assert not reader.stored
    cache.store(2, [1, 2, 3, 4, 5, 6])  # of the older version
    events.send()
    assert not reader.stored
    run(cache, 3, [1, 2, 3, 4])
    cache.free(2, [1, 2, 3, 4, 5, 6])
    events.send()
    check_reader(reader, cache)
    assert len(reader.stored) == 2


def test_pages_that_follow_each_other_are_one_event_and_a_cleared_cache_is_another() -> None:
    cache = cache_of(9, 2, lambda *pages: None)
    events, payloads = KVEvents(cache.log_events()), list[bytes]()
    events.add_sink(payloads.append)
    run(cache, 1, list(range(8)))
    events.send()
    cache.reset()
    events.send()
    kinds = [[event["type"] for event in msgpack.unpackb(each)[1]] for each in payloads]
    assert kinds == [["AllBlocksCleared"], ["BlockStored"], ["AllBlocksCleared"]]
    events.send()
    assert len(payloads) == 3  # nothing has changed, so nothing is sent


# KV events over ZeroMQ: what a subscriber gets, what it may ask for again, and that an engine's
# events describe its cache.


MILLISECONDS = 60_000
END = -1


class Subscriber:
    """Reads the engine's batches in the order of their numbers."""

    def __init__(self, config: KVEventsConfig) -> None:
        self.context = zmq.Context()
        self.context.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(config.endpoint)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, config.topic)
        self.asking = self.context.socket(zmq.DEALER)
        if config.replay_endpoint is not None:
            self.asking.connect(config.replay_endpoint)

    def receive(self) -> tuple[bytes, int, bytes]:
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), payload

    def replay(self, first: int) -> Iterator[tuple[int, bytes]]:
        self.asking.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            _, frame, payload = self.asking.recv_multipart()
            number = int.from_bytes(frame, "big", signed=True)
            if number == END:
                return
            yield number, payload

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def config(tmp_path: Path) -> KVEventsConfig:
    names = {"endpoint": f"ipc://{tmp_path}/kv", "replay_endpoint": f"ipc://{tmp_path}/again"}
    return KVEventsConfig(**names, topic="kv", buffer_steps=200)


@pytest.fixture
def subscriber(config: KVEventsConfig) -> Iterator[Subscriber]:
    subscriber = Subscriber(config)
    yield subscriber
    subscriber.close()


def test_batches_have_topic_and_number_and_the_last_ones_may_be_asked_for_again(
    config: KVEventsConfig, subscriber: Subscriber
) -> None:
    publisher = KVEventPublisher(config)
    numbers = count()
    while subscriber.socket.poll(20) == 0:  # until the subscription has arrived
        publisher.publish(b"%d" % next(numbers))
    assert subscriber.receive()[0] == b"kv"
    end = config.buffer_steps + next(numbers)
    for number in range(end - config.buffer_steps, end):
        publisher.publish(b"%d" % number)
    received = [(-1, b"")]
    while received[-1][0] != end - 1:
        received.append(subscriber.receive()[1:])
    kept = [(number, b"%d" % number) for number in range(end - config.buffer_steps, end)]
    assert received[-config.buffer_steps :] == kept
    assert list(subscriber.replay(0)) == kept
    assert list(subscriber.replay(end - 3)) == kept[-3:]
    assert list(subscriber.replay(end)) == []


def test_an_endpoint_in_use_is_refused_with_its_name(config: KVEventsConfig) -> None:
    other = zmq.Context()
    with other.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://127.0.0.1:{port}"
        with pytest.raises(ValueError, match=f"{endpoint}.*in use"):
            KVEventPublisher(KVEventsConfig(endpoint=endpoint))
    other.destroy()


@pytest.mark.thinned
@pytest.mark.parametrize(
    "drafter",
    [{"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "zoo:llama-eagle3"}, {}],
)
def test_the_events_of_an_engine_describe_its_cache(
    drafter: dict[str, Any], config: KVEventsConfig, subscriber: Subscriber
) -> None:
    options = {"max_batch_size": 4, "device": "cpu", "max_seq_len": 256}
    cache_options = {"max_tokens": 512, "tokens_per_block": 8, "kv_events_config": config}
    speculative = {"speculative_config": drafter} if drafter else {}
    prompts = [[token] * length for token, length in ((7, 30), (9, 90), (7, 60), (5, 120))]
    with LLM("zoo:llama", kv_cache_config=cache_options, **options, **speculative) as llm:
        for salt in (None, "a"):
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            handles = [llm.generate_async(each, params, cache_salt=salt) for each in prompts]
            assert all(handle.result(timeout=60).outputs[0].token_ids for handle in handles)
        llm.check_integrity()
        cache = llm._executor.parts.kv.cache
        for _ in range(3000):  # the publisher's thread may not have sent the last batch yet
            reader = Reader()
            batches = [reader.read(payload) for _, payload in subscriber.replay(0)]
            if reader.prefixes() == reusable(cache):
                break
            sleep(0.02)
        assert isinstance(batches[0].events[0], Cleared)
        assert cache.lookahead == bool(drafter) and len(reader.stored) > 20
        check_reader(reader, cache)
    again = KVEventPublisher(config)  # the shutdown has given the endpoints back
    del again
