"""The paged cache's counterpart in tests: a simulated device that records what every position of
every page really holds, and uses of the cache, directed and random, that compare it with what
should be there."""

import copy
import random
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from tllm_spec.executor.resources.interface import PageGroup
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.resources.radix import NO_PAGE
from tllm_spec.kernels.attention.visible_keys import KeySpan


class Device:
    """KV memory. The KV at a position depends on all tokens up to it and on `lookahead` tokens
    after it, so here it is a hash of those."""

    def __init__(self, num_pages: int, page_size: int, lookahead: int = 0) -> None:
        self.page_size = page_size
        self.lookahead = lookahead
        self.kv: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.copies: list[tuple[int, int]] = []

    def copy_page(self, source: int, destination: int) -> None:
        assert source != destination
        self.kv[destination] = list(self.kv[source])
        self.copies.append((source, destination))

    def write(self, pages: list[int], tokens: list[int], start: int, end: int) -> None:
        """Runs the positions `start` to `end`. Without the next token nothing of use is written."""
        values = self.values(tokens)
        for position in range(start, end):
            value = values[position] if position < len(values) else None
            self.kv[pages[position // self.page_size]][position % self.page_size] = value

    def values(self, tokens: list[int]) -> list[int]:
        """The values of all positions whose KV `tokens` determine."""
        return prefix_hashes(tokens)[self.lookahead :]

    def read(self, pages: list[int], num_tokens: int) -> list[int | None]:
        return [self.kv[pages[i // self.page_size]][i % self.page_size] for i in range(num_tokens)]


def prefix_hashes(tokens: list[int]) -> list[int]:
    values, value = [], 0
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


class Driver:
    """A cache and its devices, one for each layer group, used as the executor does; every step
    checks what the interface promises."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        spans: Sequence[KeySpan | None] = (None,),
        lookahead: int = 0,
        **options: Any,
    ) -> None:
        """`options` are the cache's; `key_lookahead` among them gives it another lookahead than the
        device has."""
        self.page_size = page_size
        self.lookahead = lookahead
        self.spans = spans
        self.devices = [Device(num_pages, page_size, lookahead) for _ in spans]
        self.device = self.devices[0]
        options["lookahead"] = options.pop("key_lookahead", lookahead)
        groups = [
            PageGroup(num_pages, device.copy_page, span)
            for device, span in zip(self.devices, spans, strict=True)
        ]
        self.cache = PagedCache(groups, page_size, **options)
        self.tokens: dict[
            int, list[int]
        ] = {}  # of each sequence: those that its computed KV depends on
        self.next_id = 0

    def start(
        self, prompt: list[int], chunk: int | None = None, *, reuse: bool = True
    ) -> int | None:
        """Reuses the cache, then computes up to `chunk`; None, and no trace, if pages are
        missing."""
        cache, seq_id = self.cache, self.next_id
        self.next_id += 1
        end = len(prompt) if chunk is None else chunk
        visible = prompt if reuse else []
        available, expected = self.available(), cache.match(visible)
        needed = cache.new_pages_needed(visible, end)
        fits = all(need <= left for need, left in zip(needed, available, strict=True))
        cached = cache.add_sequence(seq_id, prompt, reuse=reuse)
        assert cached == expected <= max(len(prompt) - 1, 0)
        self.check_contents(seq_id, self.device.values(prompt)[:cached])
        end = max(end, cached)
        assert cache.extend(seq_id, end) == fits
        if not fits:
            cache.free(seq_id)
            return None
        left = self.available()
        assert [before - now for before, now in zip(available, left, strict=True)] == needed
        self.write(seq_id, prompt, cached, end)
        self.tokens[seq_id] = prompt[: end + self.lookahead]
        return seq_id

    def available(self) -> list[int]:
        return [self.cache.available(group) for group in range(len(self.spans))]

    def write(self, seq_id: int, tokens: list[int], start: int, end: int) -> None:
        for device, own in zip(self.devices, self.cache.sequences[seq_id].groups, strict=True):
            device.write(own.pages, tokens, start, end)

    def num_computed(self, seq_id: int) -> int:
        """Positions of the sequence whose KV is computed and final."""
        return max(len(self.tokens[seq_id]) - self.lookahead, 0)

    def grow(self, seq_id: int, accepted: list[int], rejected: list[int]) -> None:
        """One speculative round: writes the window, keeps `accepted`, rewinds `rejected`."""
        cache, page_size, pages = self.cache, self.page_size, self.cache.pages(seq_id)
        window = self.tokens[seq_id] + accepted + rejected
        before, available = list(pages), cache.num_available
        self.note(seq_id)
        if not cache.extend(seq_id, len(window)):
            assert pages == before
            missing = -(-len(window) // page_size) - len(before)
            assert cache.num_available == available < missing
            return
        assert pages[: len(before)] == before and self.num_known(seq_id) == len(before)
        self.write(seq_id, window, self.num_computed(seq_id), len(window))
        self.tokens[seq_id] += accepted
        self.rewind(seq_id)

    def rewind(self, seq_id: int) -> None:
        pages = list(self.cache.pages(seq_id))
        self.note(seq_id)
        available, num_tokens = self.cache.num_available, self.num_computed(seq_id)
        keep = -(-num_tokens // self.page_size)
        given_back = self.cache.rewind(seq_id, num_tokens)
        assert given_back == len(pages) - keep == self.cache.num_available - available
        assert self.cache.pages(seq_id) == pages[:keep]
        assert self.num_known(seq_id) == keep

    def slide(self, seq_id: int) -> None:
        """Lets go of what the next position does not see."""
        num_tokens, held = self.num_computed(seq_id), self.available()
        self.cache.slide(seq_id, num_tokens)
        for group, span in enumerate(self.spans):
            own = self.cache.sequences[seq_id].groups[group]
            first = 0 if span is None else span.first_key(num_tokens) // self.page_size
            assert own.first >= first and NO_PAGE not in own.pages[own.first :]
            assert self.cache.available(group) >= held[group]

    def store(self, seq_id: int, num_tokens: int) -> None:
        """Stores the first `num_tokens` positions, as far as the tokens after them are known."""
        before = list(self.cache.pages(seq_id))
        self.note(seq_id)
        self.cache.store(seq_id, self.tokens[seq_id][: num_tokens + self.cache.lookahead])
        pairs = enumerate(zip(before, self.cache.pages(seq_id), strict=True))
        changed = [index for index, (one, other) in pairs if one != other]
        assert self.num_known(seq_id) == min(changed, default=len(before))

    def note(self, seq_id: int) -> None:
        """The pages as they are now are known."""
        for own in self.cache.sequences[seq_id].groups:
            own.num_known = len(own.pages)

    def num_known(self, seq_id: int) -> int:
        return self.cache.sequences[seq_id].groups[0].num_known

    def free(self, seq_id: int, num_tokens: int | None = None) -> None:
        num_tokens = self.num_computed(seq_id) if num_tokens is None else num_tokens
        self.cache.free(seq_id, self.tokens.pop(seq_id)[: num_tokens + self.cache.lookahead])

    def begin(self, prompt: list[int]) -> int:
        """Starts a sequence that has room."""
        seq_id = self.start(prompt)
        assert seq_id is not None
        return seq_id

    def run(self, tokens: list[int]) -> None:
        """A whole request, from its prompt to its end."""
        self.free(self.begin(tokens))

    def check(self) -> None:
        self.cache.check_integrity()
        for seq_id, tokens in self.tokens.items():
            self.check_contents(seq_id, self.device.values(tokens))

    def check_contents(self, seq_id: int, values: list[int]) -> None:
        """Checks the positions that a query after these values sees."""
        groups = self.cache.sequences[seq_id].groups
        for device, own, span in zip(self.devices, groups, self.spans, strict=True):
            first = span.first_key(len(values)) if span else 0
            assert NO_PAGE not in own.pages[own.first :]
            assert own.first <= first // self.page_size, "a page is gone too early"
            found = device.read(own.pages, len(values))
            assert found[first:] == values[first:], (
                f"sequence {seq_id} sees the KV of other tokens than its own"
            )


class RandomUse:
    """Random operations on texts that share prefixes, in a pool so small that it evicts all the
    time."""

    def __init__(
        self, page_size: int, num_pages: int, *, partial_reuse: bool, **options: Any
    ) -> None:
        self.rng = random.Random(page_size * 100 + num_pages)
        self.driver = Driver(num_pages, page_size, enable_partial_reuse=partial_reuse, **options)
        self.operations = [self.grow, self.store, self.finish]
        if self.driver.cache.has_spans:
            self.operations.append(self.driver.slide)
        self.longest = page_size * num_pages // 2 + 2
        self.texts = [self.rng.choices(range(2), k=2 * self.longest) for _ in range(2)]

    def text(self, length: int) -> list[int]:
        """A known text, or one that leaves it somewhere."""
        tokens = self.rng.choice(self.texts)[:length]
        if tokens and self.rng.random() < 0.4:
            tokens[self.rng.randrange(len(tokens))] += 1
        return tokens

    def step(self) -> None:
        rng, driver = self.rng, self.driver
        if not driver.tokens or rng.random() < 0.3:
            self.start()
        else:
            rng.choice(self.operations)(rng.choice(list(driver.tokens)))
        if rng.random() < 0.1:
            self.claim_everything()
        if rng.random() < 0.01:
            driver.cache.reset()
        driver.check()

    def start(self) -> None:
        prompt = self.text(self.rng.randint(0, self.longest))
        self.driver.start(prompt, self.rng.randint(0, len(prompt)), reuse=self.rng.random() < 0.9)

    def grow(self, seq_id: int) -> None:
        length = len(self.driver.tokens[seq_id])
        accepted = self.text(length + self.rng.randint(0, 5))[length:]
        self.driver.grow(seq_id, accepted, rejected=[9] * self.rng.randint(0, 5))

    def store(self, seq_id: int) -> None:
        self.driver.store(seq_id, max(self.driver.num_computed(seq_id) - self.rng.randint(0, 2), 0))

    def finish(self, seq_id: int) -> None:
        self.driver.free(seq_id, self.rng.choice([0, 1, None, None, None]))

    def claim_everything(self) -> None:
        """Every available page can really be allocated, and not one more."""
        driver = copy.deepcopy(self.driver)
        tree = driver.cache._tree
        tree._roots = WeakValueDictionary({(0, None): tree.root})  # not copied: weak references
        available = driver.cache.num_available
        num_tokens = available * driver.page_size
        driver.cache.add_sequence(driver.next_id, [])
        assert not driver.cache.extend(driver.next_id, num_tokens + 1)
        assert driver.cache.extend(driver.next_id, num_tokens)
        assert driver.cache.num_available == 0
        driver.check()
