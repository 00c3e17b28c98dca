"""The paged cache against a simulated device that records what every position of every page really holds."""

import copy
import random
import time

import pytest

from tllm_spec.executor.resources.paged_cache import CacheStats, PagedCache


class Device:
    """KV memory. The KV at a position depends on all tokens up to it, so here it is a hash of that prefix."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.kv: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]
        self.copies: list[tuple[int, int]] = []

    def copy_page(self, source: int, destination: int) -> None:
        assert source != destination
        self.kv[destination] = list(self.kv[source])
        self.copies.append((source, destination))

    def write(self, pages: list[int], tokens: list[int], start: int) -> None:
        for position, value in enumerate(prefix_hashes(tokens)):
            if position >= start:
                self.kv[pages[position // self.page_size]][position % self.page_size] = value

    def read(self, pages: list[int], num_tokens: int) -> list[int | None]:
        return [self.kv[pages[i // self.page_size]][i % self.page_size] for i in range(num_tokens)]


def prefix_hashes(tokens: list[int]) -> list[int]:
    values, value = [], 0
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


def common_length(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(left), len(right)))


class Driver:
    """A cache and its device, used as the executor does; every step checks what the interface promises."""

    def __init__(self, num_pages: int, page_size: int, **options: bool) -> None:
        self.page_size = page_size
        self.device = Device(num_pages, page_size)
        self.cache = PagedCache(num_pages, page_size, copy_page=self.device.copy_page, **options)
        self.tokens: dict[int, list[int]] = {}  # of each sequence: the tokens whose KV is computed
        self.next_id = 0

    def start(self, prompt: list[int], chunk: int | None = None, *, reuse: bool = True) -> int | None:
        """Reuses the cache, then computes up to `chunk`; None, and no trace, if pages are missing."""
        cache, seq_id = self.cache, self.next_id
        self.next_id += 1
        end = len(prompt) if chunk is None else chunk
        visible = prompt if reuse else []
        available, expected = cache.num_available, cache.match(visible)
        needed = cache.new_pages_needed(visible, end)
        cached = cache.add_sequence(seq_id, prompt, reuse=reuse)
        assert cached == expected <= max(len(prompt) - 1, 0)
        assert self.device.read(cache.pages(seq_id), cached) == prefix_hashes(prompt[:cached])
        end = max(end, cached)
        assert cache.extend(seq_id, end) == (needed <= available)
        if needed > available:
            cache.free(seq_id)
            return None
        assert available - cache.num_available == needed
        self.device.write(cache.pages(seq_id), prompt[:end], cached)
        self.tokens[seq_id] = prompt[:end]
        return seq_id

    def grow(self, seq_id: int, accepted: list[int], rejected: list[int]) -> None:
        """One speculative round: writes the window, keeps `accepted`, rewinds `rejected`."""
        cache, page_size, pages = self.cache, self.page_size, self.cache.pages(seq_id)
        window = self.tokens[seq_id] + accepted + rejected
        before, available, version = list(pages), cache.num_available, cache.version(seq_id)
        if not cache.extend(seq_id, len(window)):
            assert pages == before
            assert cache.num_available == available < -(-len(window) // page_size) - len(before)
            return
        assert pages[: len(before)] == before and cache.version(seq_id) == version
        self.device.write(pages, window, len(self.tokens[seq_id]))
        self.tokens[seq_id] += accepted
        self.rewind(seq_id)

    def rewind(self, seq_id: int) -> None:
        pages, version = list(self.cache.pages(seq_id)), self.cache.version(seq_id)
        available, keep = self.cache.num_available, -(-len(self.tokens[seq_id]) // self.page_size)
        given_back = self.cache.rewind(seq_id, len(self.tokens[seq_id]))
        assert given_back == len(pages) - keep == self.cache.num_available - available
        assert self.cache.pages(seq_id) == pages[:keep]
        assert (self.cache.version(seq_id) != version) == (given_back > 0)

    def store(self, seq_id: int, num_tokens: int) -> None:
        pages, version = list(self.cache.pages(seq_id)), self.cache.version(seq_id)
        self.cache.store(seq_id, self.tokens[seq_id][:num_tokens])
        assert (self.cache.version(seq_id) != version) == (self.cache.pages(seq_id) != pages)

    def free(self, seq_id: int, num_tokens: int | None = None) -> None:
        self.cache.free(seq_id, self.tokens.pop(seq_id)[:num_tokens])

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
            pages = self.cache.pages(seq_id)
            assert 0 not in pages
            assert self.device.read(pages, len(tokens)) == prefix_hashes(tokens)


class RandomUse:
    """Random operations on texts that share prefixes, in a pool so small that it evicts all the time."""

    def __init__(self, page_size: int, num_pages: int, *, partial_reuse: bool) -> None:
        self.rng = random.Random(page_size * 100 + num_pages)
        self.driver = Driver(num_pages, page_size, enable_partial_reuse=partial_reuse)
        self.longest = page_size * num_pages // 2 + 2
        self.texts = [self.rng.choices(range(2), k=2 * self.longest) for _ in range(2)]

    def text(self, length: int) -> list[int]:
        """A known text, or one that leaves it somewhere."""
        tokens = self.rng.choice(self.texts)[:length]
        if tokens and self.rng.random() < 0.4:
            tokens[self.rng.randrange(length)] += 1
        return tokens

    def step(self) -> None:
        rng, driver = self.rng, self.driver
        if not driver.tokens or rng.random() < 0.3:
            self.start()
        else:
            rng.choice([self.grow, self.store, self.finish])(rng.choice(list(driver.tokens)))
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
        self.driver.store(seq_id, max(len(self.driver.tokens[seq_id]) - self.rng.randint(0, 2), 0))

    def finish(self, seq_id: int) -> None:
        self.driver.free(seq_id, self.rng.choice([0, 1, None, None, None]))

    def claim_everything(self) -> None:
        """Every available page can really be allocated, and not one more."""
        driver = copy.deepcopy(self.driver)
        num_tokens = driver.cache.num_available * driver.page_size
        driver.cache.add_sequence(driver.next_id, [])
        assert not driver.cache.extend(driver.next_id, num_tokens + 1)
        assert driver.cache.extend(driver.next_id, num_tokens)
        assert driver.cache.num_available == 0
        driver.check()


@pytest.mark.parametrize("partial_reuse", [True, False])
@pytest.mark.parametrize("num_pages", [3, 8, 20])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_every_sequence_sees_its_own_tokens_whatever_the_order_of_operations(
    page_size: int, num_pages: int, partial_reuse: bool
) -> None:
    use = RandomUse(page_size, num_pages, partial_reuse=partial_reuse)
    for _ in range(1000):
        use.step()
    stats = use.driver.cache.stats
    assert stats.evicted_pages > 20 and stats.reused_tokens > 10, "full pools or common prefixes were rare"
    assert (stats.copied_pages > 20) == (partial_reuse and page_size > 1)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("partial_reuse", [True, False])
def test_a_match_is_the_longest_prefix_of_any_earlier_text(page_size: int, partial_reuse: bool) -> None:
    rng = random.Random(page_size)
    driver = Driver(4000, page_size, enable_partial_reuse=partial_reuse)
    earlier: list[list[int]] = []
    for _ in range(200):
        text = rng.choices(range(2), weights=[4, 1], k=rng.randint(1, 20))
        longest = max((common_length(text[:-1], other) for other in earlier), default=0)
        assert driver.cache.match(text) == (longest if partial_reuse else longest // page_size * page_size)
        driver.run(text)
        earlier.append(text)
    driver.check()


def test_a_second_equal_prompt_shares_all_full_pages_but_computes_its_last_token() -> None:
    driver = Driver(num_pages=10, page_size=4)
    prompt = list(range(12))
    driver.run(prompt)
    assert driver.cache.match(prompt) == 11
    assert driver.cache.match([*prompt, 99]) == 12
    driver.begin([*prompt, 99])
    assert driver.device.copies == []
    assert driver.cache.stats == CacheStats(12, 13, 3, 0, 3 + 1, 0)


def test_matching_has_no_side_effect() -> None:
    driver = Driver(num_pages=4, page_size=2)
    driver.run([1, 2])
    driver.run([5, 6])
    assert driver.cache.match([1, 2, 3]) == 2
    assert driver.cache.new_pages_needed([1, 2, 3], 3) == 2
    driver.run([7, 8, 9, 9])  # takes the free page and evicts one: still the oldest, [1, 2]
    assert driver.cache.stats.reused_tokens == 0
    assert driver.cache.match([1, 2, 3]) == 0
    assert driver.cache.match([5, 6, 3]) == 2


def test_a_partly_matching_page_is_copied_not_shared() -> None:
    driver = Driver(num_pages=10, page_size=4)
    driver.run([1, 2, 3, 4, 5, 6, 7, 8])
    seq_id = driver.begin([1, 2, 3, 4, 5, 6, 0, 0])
    [(source, destination)] = driver.device.copies
    assert driver.cache.pages(seq_id)[1] == destination != source
    assert driver.cache.stats.copied_pages == 1
    assert driver.cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    driver.check()


def test_the_last_partial_page_of_a_finished_sequence_serves_its_continuation() -> None:
    driver = Driver(num_pages=10, page_size=4)
    driver.run([1, 2, 3, 4, 5, 6])
    assert driver.cache.match([1, 2, 3, 4, 5, 6, 7]) == 6
    driver.run([1, 2, 3, 4, 5, 6, 7])
    assert driver.cache.match([1, 2, 3, 4, 5, 6, 7, 8]) == 7
    assert driver.cache.num_available == 9


def test_without_block_reuse_nothing_is_kept() -> None:
    driver = Driver(num_pages=10, page_size=4, enable_block_reuse=False)
    seq_id = driver.begin(list(range(10)))
    driver.store(seq_id, 10)
    driver.free(seq_id)
    assert driver.cache.match(list(range(10))) == 0
    driver.check()


def test_two_equal_prompts_computed_side_by_side_end_on_the_same_pages() -> None:
    driver = Driver(num_pages=10, page_size=2)
    first, second = driver.begin([1, 2, 3, 4, 5]), driver.begin([1, 2, 3, 4, 5])
    available, version = driver.cache.num_available, driver.cache.version(second)
    driver.store(first, 5)
    driver.store(second, 5)
    assert driver.cache.pages(first)[:2] == driver.cache.pages(second)[:2]
    assert driver.cache.pages(first)[2:] == driver.cache.private_pages(first)
    assert driver.cache.private_pages(first) != driver.cache.private_pages(second)
    assert driver.cache.num_available == available + 2
    assert driver.cache.version(second) != version
    driver.check()


def test_a_rewind_gives_back_exactly_the_rejected_pages() -> None:
    driver = Driver(num_pages=10, page_size=4)
    seq_id = driver.begin([1, 2, 3, 4, 5])
    driver.store(seq_id, 5)
    assert driver.cache.extend(seq_id, 17)
    assert driver.cache.rewind(seq_id, 9) == 2
    assert driver.cache.rewind(seq_id, 9) == 0
    assert driver.cache.num_available == 9 - 3
    driver.check()


def test_a_rewind_into_shared_pages_is_a_bug_of_the_caller() -> None:
    driver = Driver(num_pages=10, page_size=4)
    seq_id = driver.begin([1, 2, 3, 4, 5])
    driver.store(seq_id, 5)
    with pytest.raises(AssertionError, match="shared pages"):
        driver.cache.rewind(seq_id, 3)


def test_starting_a_sequence_never_evicts_the_pages_that_it_matched() -> None:
    driver = Driver(num_pages=5, page_size=2)
    driver.run([1, 2, 3, 4])  # the oldest cached pages, hence the next to be evicted
    driver.run([5, 6, 7, 8])
    driver.begin([1, 2, 3, 4, 9, 9, 9, 9])
    assert driver.cache.stats.reused_tokens == 4 and driver.cache.stats.evicted_pages == 2
    driver.check()


def test_a_partial_match_is_left_out_when_no_page_is_available_for_the_copy() -> None:
    driver = Driver(num_pages=3, page_size=4)
    driver.run([1, 2, 3, 4, 5, 6])
    prompt = [1, 2, 3, 4, 5, 9, 9]
    assert driver.cache.match(prompt) == 4
    driver.begin(prompt)  # evicts what it could have copied, and still fits
    assert driver.device.copies == []
    driver.check()


def test_a_failed_extension_changes_nothing() -> None:
    driver = Driver(num_pages=4, page_size=2)
    driver.run([1, 2])
    seq_id = driver.begin([5, 6])
    assert not driver.cache.extend(seq_id, 7)
    assert driver.cache.match([1, 2, 3]) == 2 and driver.cache.num_available == 2
    assert driver.cache.extend(seq_id, 6)


def test_of_a_failed_request_only_the_pages_stored_before_are_kept() -> None:
    driver = Driver(num_pages=6, page_size=2)
    seq_id = driver.begin([1, 2, 3, 4, 5])
    driver.store(seq_id, 2)
    driver.free(seq_id, 0)
    assert driver.cache.match([1, 2, 3, 4, 5]) == 2 and driver.cache.num_available == 5


def test_a_reset_forgets_cached_pages_but_leaves_running_sequences_alone() -> None:
    driver = Driver(num_pages=10, page_size=2)
    driver.run([1, 2, 3, 4])
    seq_id = driver.begin([5, 6, 7])
    driver.store(seq_id, 3)
    driver.cache.reset()
    assert driver.cache.match([1, 2, 3, 4, 5]) == 0 and driver.cache.num_available == 7
    driver.check()


def test_the_version_of_a_restarted_sequence_is_new() -> None:
    cache = PagedCache(4, 2, copy_page=lambda source, destination: None)
    cache.add_sequence(1, [1, 2])
    version = cache.version(1)
    cache.free(1)
    cache.add_sequence(1, [1, 2])
    assert cache.version(1) != version


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda cache: cache.pages(1).pop(), "are not the 5 pages"),
        (lambda cache: cache.pages(1).append(cache.pages(2)[-1]), "each once"),
        (lambda cache: cache.pages(1).__setitem__(0, cache.pages(2)[-1]), "is not the tree's"),
        (lambda cache: cache._sequences[1].nodes.pop(), "1 references and has 0 holders"),
    ],
)
def test_the_integrity_check_names_what_is_lost_or_held_twice(damage, sentence) -> None:
    cache = PagedCache(6, 2, copy_page=lambda source, destination: None)
    for seq_id in (1, 2):
        cache.add_sequence(seq_id, [seq_id] * 3)
        assert cache.extend(seq_id, 4)
        cache.store(seq_id, [seq_id] * 3)
    cache.check_integrity()
    damage(cache)
    with pytest.raises(AssertionError, match=sentence):
        cache.check_integrity()


def test_storing_growing_tokens_reads_only_the_pages_not_stored_yet() -> None:
    class Recorder(list[int]):
        def __getitem__(self, index):
            starts.append(index.start)
            return super().__getitem__(index)

    starts: list[int] = []
    cache = PagedCache(10, 4, copy_page=lambda source, destination: None)
    cache.add_sequence(1, [])
    assert cache.extend(1, 36)
    for num_tokens, pages_read in [(16, [0, 4, 8, 12]), (19, []), (24, [16, 20])]:
        cache.store(1, Recorder(range(num_tokens)))
        assert starts == pages_read
        starts.clear()


def test_matching_a_long_prompt_takes_well_under_a_millisecond() -> None:
    cache = PagedCache(300, 32, copy_page=lambda source, destination: None)
    prompt = list(range(8192))
    cache.add_sequence(1, prompt)
    assert cache.extend(1, 8192)
    cache.free(1, prompt)
    assert cache.match(prompt) == 8191
    best = min(_seconds_of_a_match(cache, prompt) for _ in range(20))
    assert best < 1e-3


def _seconds_of_a_match(cache: PagedCache, prompt: list[int]) -> float:
    start = time.perf_counter()
    cache.match(prompt)
    return time.perf_counter() - start
