"""Which of several engines gets a request: the one that has most of its prompt in the prefix cache.

The router reads the KV events that routers outside of the server get, too. A busy engine is passed
over, whatever it has cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from tllm_spec.executor.resources.radix import block_hashes
from tllm_spec.lora_request import CacheSalt

# An engine with more unfinished tokens than this many times the mean is busy, if it also has so
# many more than the mean.
BUSY_FACTOR, BUSY_TOKENS = 1.5, 8192


class PrefixRouter:
    """Knows what each engine has cached, by its number."""

    def __init__(self, num_engines: int, page_size: int) -> None:
        self._page_size = page_size
        self._cached: list[set[int]] = [set() for _ in range(num_engines)]

    def read(self, engine: int, payload: bytes) -> None:
        """payload: a batch of KV events."""
        cached = self._cached[engine]
        _, events, _ = msgpack.unpackb(payload)
        for event in events:
            self._apply(cached, event)

    def forget(self, engine: int) -> None:
        """Forgets the cache of an engine that has ended."""
        self._cached[engine].clear()

    def hashes(self, tokens: Sequence[int], salt: CacheSalt) -> list[int]:
        """Hashes the prompt's pages, for `choose`."""
        return block_hashes(tokens, self._page_size, salt)

    def choose(self, hashes: Sequence[int], unfinished: Mapping[int, int]) -> int:
        """unfinished: tokens of the requests that each engine has, of those that may be chosen.
        Among equal prefixes the engine with the fewest gets the request, and among equally busy
        engines the one that has the least cached."""
        mean = sum(unfinished.values()) / len(unfinished)
        limit = max(BUSY_FACTOR * mean, mean + BUSY_TOKENS)
        free = [engine for engine, tokens in unfinished.items() if tokens <= limit]

        def rank(engine: int) -> tuple[int, int, int]:
            num_cached = self.num_cached(engine, hashes)
            return -num_cached, unfinished[engine], len(self._cached[engine])

        return min(free, key=rank)

    def num_cached(self, engine: int, hashes: Sequence[int]) -> int:
        """Pages of the prompt that the engine would reuse. Where layers see a window, pages before
        the last one may be gone."""
        cached = self._cached[engine]
        for number in range(len(hashes), 0, -1):
            if hashes[number - 1] in cached:
                return number
        return 0

    @staticmethod
    def _apply(cached: set[int], event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "BlockStored":
            cached.update(event["block_hashes"])
        elif kind == "BlockRemoved":
            cached.difference_update(event["block_hashes"])
        else:
            cached.clear()
