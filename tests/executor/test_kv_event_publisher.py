"""KV events over ZeroMQ: what a subscriber gets, what it may ask for again, and that an engine's
events describe its cache."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.executor.kv_event_reader import Cleared, Reader
from tests.executor.test_kv_events import check_reader, reusable
from tllm_spec import LLM, SamplingParams
from tllm_spec.config.engine_config import KVEventsConfig
from tllm_spec.executor.resources.kv_events import KVEventPublisher

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
        for _ in range(100):  # the publisher's thread may not have sent the last batch yet
            reader = Reader()
            batches = [reader.read(payload) for _, payload in subscriber.replay(0)]
            if reader.prefixes() == reusable(cache):
                break
        assert isinstance(batches[0].events[0], Cleared)
        assert cache.lookahead == bool(drafter) and len(reader.stored) > 20
        check_reader(reader, cache)
    again = KVEventPublisher(config)  # the shutdown has given the endpoints back
    del again
