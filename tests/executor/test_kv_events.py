"""KV events against the prefix tree: what a reader knows is what the cache would reuse."""

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from tests.executor.kv_event_reader import Reader
from tests.executor.one_group import cache_of
from tests.executor.paged_cache_driver import RandomUse
from tests.executor.test_paged_cache import SPANS
from tllm_spec.executor.resources.kv_events import KVEvents
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


@pytest.mark.thinned(6)
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
