"""Which of several engines gets a request."""

import pytest

from tests.executor.one_group import cache_of
from tllm_spec.executor.resources.kv_events import KVEvents
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.server.replicas import BUSY_TOKENS, PrefixRouter

PAGE = 4
PROMPT = list(range(22))  # five pages and two tokens


class CachedEngine:
    """An engine's cache, whose events a router reads."""

    def __init__(self, router: PrefixRouter, number: int) -> None:
        self.cache: PagedCache = cache_of(64, PAGE, lambda *pages: None)
        self.events = KVEvents(self.cache.log_events())
        self.events.add_sink(lambda payload: router.read(number, payload))

    def run(self, tokens: list[int], salt: str | None = None) -> None:
        self.cache.add_sequence(1, tokens, salt)
        assert self.cache.extend(1, len(tokens))
        self.cache.free(1, tokens)
        self.events.send()


@pytest.fixture
def router() -> PrefixRouter:
    return PrefixRouter(3, PAGE)


@pytest.fixture
def engines(router: PrefixRouter) -> list[CachedEngine]:
    return [CachedEngine(router, number) for number in range(3)]


def chosen(router: PrefixRouter, unfinished: list[int], salt: str | None = None) -> int:
    return router.choose(router.hashes(PROMPT, salt), dict(enumerate(unfinished)))


def test_the_longest_cached_prefix_decides_and_then_the_fewest_tokens(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    assert chosen(router, [5, 3, 4]) == 1
    engines[2].run(PROMPT[:9])
    assert chosen(router, [5, 3, 4]) == 2
    engines[0].run(PROMPT[:13])
    assert chosen(router, [5, 3, 4]) == 0
    engines[1].run(PROMPT[:12] + [99] * 8)
    assert chosen(router, [5, 3, 4]) == 1  # as long a prefix as that of engine 0, and fewer tokens
    assert router.num_cached(1, router.hashes(PROMPT, None)) == 3


def test_a_prefix_counts_only_for_requests_with_its_salt(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    engines[2].run(PROMPT, "a")
    assert chosen(router, [1, 0, 1]) == 1
    assert chosen(router, [1, 0, 1], "a") == 2
    assert chosen(router, [1, 0, 1], "b") == 1


def test_the_router_knows_as_many_pages_as_the_cache_would_reuse(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    for end in (4, 20, 22):
        engines[0].run(PROMPT[:end])
        expected = engines[0].cache.match(PROMPT) // PAGE
        assert router.num_cached(0, router.hashes(PROMPT, None)) == expected
    engines[0].cache.reset()
    engines[0].events.send()
    assert router.num_cached(0, router.hashes(PROMPT, None)) == 0


def test_a_busy_engine_is_passed_over_whatever_it_has_cached(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    engines[2].run(PROMPT)
    assert chosen(router, [0, 0, BUSY_TOKENS]) == 2
    assert chosen(router, [9, 8, 3 * BUSY_TOKENS]) == 1
    assert chosen(router, [100 * BUSY_TOKENS, 99 * BUSY_TOKENS, 101 * BUSY_TOKENS]) == 2


def test_an_engine_that_has_ended_has_nothing_cached(
    router: PrefixRouter, engines: list[CachedEngine]
) -> None:
    engines[1].run(PROMPT)
    assert chosen(router, [0, 9, 9]) == 1
    router.forget(1)
    assert chosen(router, [0, 9, 9]) == 0
    engines[1].events.add_sink(lambda payload: router.read(1, payload))  # it is connected again
    assert chosen(router, [0, 9, 9]) == 1
