"""The paged cache against a simulated device (see paged_cache_driver.py)."""

import random
from itertools import product
from typing import Any

import pytest

from tests.executor.one_group import cache_of
from tests.executor.paged_cache_driver import Driver, RandomUse
from tllm_spec.executor.resources.paged_cache import CacheStats
from tllm_spec.kernels.attention.visible_keys import KeySpan


def common_length(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(left), len(right)))


SPANS = {
    "a sliding window": [KeySpan(5, slides=True)],
    "a window of one key": [KeySpan(1, slides=True), None],
    "all keys and a window": [None, KeySpan(7, slides=True)],
    "two windows": [KeySpan(2, slides=True), KeySpan(11, slides=True)],
    "chunks and all keys": [KeySpan(6, slides=False), None],
}


@pytest.mark.thinned(27)
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(
    ("name", "page_size", "num_pages", "partial_reuse"),
    [
        *product(["all keys"], (1, 2, 4, 8), (3, 8, 20), (True, False)),
        *((name, *each, True) for name in SPANS for each in ((1, 24), (2, 13), (4, 9))),
    ],
)
def test_every_sequence_sees_its_own_tokens_whatever_the_order_of_operations(
    name: str, page_size: int, num_pages: int, partial_reuse: bool, lookahead: int
) -> None:
    options: dict[str, Any] = {"spans": SPANS[name]} if name in SPANS else {}
    options |= {"partial_reuse": partial_reuse, "lookahead": lookahead}
    use = RandomUse(page_size, num_pages, **options)
    for _ in range(2500 if lookahead and name not in SPANS else 1200):  # matches are rarer with one
        use.step()
    stats = use.driver.cache.stats
    assert stats.evicted_pages > 20 and stats.reused_tokens > 10, (
        "full pools or common prefixes were rare"
    )
    if name not in SPANS:
        assert (stats.copied_pages > 20) == (partial_reuse and page_size > 1)


@pytest.mark.covering
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
@pytest.mark.parametrize("partial_reuse", [True, False])
def test_a_match_is_the_longest_prefix_of_any_earlier_text(
    page_size: int, partial_reuse: bool, lookahead: int
) -> None:
    rng = random.Random(page_size)
    driver = Driver(4000, page_size, enable_partial_reuse=partial_reuse, lookahead=lookahead)
    earlier: list[list[int]] = []
    for _ in range(200):
        text = rng.choices(range(2), weights=[4, 1], k=rng.randint(1, 20))
        reusable = text[: len(text) - 1 + lookahead]
        longest = max((common_length(reusable, other) - lookahead for other in earlier), default=0)
        longest = max(longest, 0)
        assert driver.cache.match(text) == (
            longest if partial_reuse else longest // page_size * page_size
        )
        driver.run(text)
        earlier.append(text)
    driver.check()


def test_each_salt_has_pages_of_its_own_and_leaves_nothing_when_they_are_evicted() -> None:
    copied: list[tuple[int, int]] = []
    cache = cache_of(9, 4, lambda *pages: copied.append(pages))
    prompt = list(range(10))
    for seq_id, salt in enumerate([None, "a", "b"]):
        assert cache.match(prompt, salt) == cache.add_sequence(seq_id, prompt, salt) == 0
        assert cache.extend(seq_id, 8)
        cache.free(seq_id, prompt[:7])
        cache.check_integrity()
    assert [cache.match(prompt, salt) for salt in (None, "a", "b", "c")] == [7, 7, 7, 0]
    assert [cache.reported_len(7, salt) for salt in (None, "a")] == [4, 7]
    pages = [
        cache.pages(seq_id)[0]
        for seq_id, salt in ((4, "a"), (5, "b"), (6, "a"))
        if cache.add_sequence(seq_id, prompt, salt)
    ]
    assert pages[0] == pages[2] != pages[1] and len(copied) == 3
    cache.check_integrity()
    for seq_id in (4, 5, 6):
        cache.free(seq_id)
    cache.reset()
    cache.check_integrity()
    assert list(cache._tree._roots) == [(0, None)] and cache.num_available == 8


def test_a_second_equal_prompt_shares_all_full_pages_but_computes_its_last_token() -> None:
    driver = Driver(num_pages=10, page_size=4)
    prompt = list(range(12))
    driver.run(prompt)
    assert driver.cache.match(prompt) == 11
    assert driver.cache.match([*prompt, 99]) == 12
    driver.begin([*prompt, 99])
    assert driver.device.copies == []
    assert driver.cache.stats == CacheStats(12, 13, 3, 0, 3 + 1, 0)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_keys_without_the_next_token_would_give_a_sequence_the_kv_of_another_one(
    page_size: int,
) -> None:
    use = RandomUse(page_size, 20, partial_reuse=True, lookahead=1, key_lookahead=0)
    with pytest.raises(AssertionError, match="sees the KV of other tokens"):
        for _ in range(1000):
            use.step()


@pytest.mark.parametrize(("lookahead", "reused", "num_shared"), [(0, 12, 3), (1, 11, 2)])
def test_a_common_prefix_that_ends_with_a_page_is_reused_without_its_lookahead(
    lookahead: int, reused: int, num_shared: int
) -> None:
    driver = Driver(num_pages=20, page_size=4, lookahead=lookahead)
    common = list(range(12))
    first, second = [*common, 50, 51], [*common, 60, 61]
    driver.run(first)
    assert driver.cache.match(second) == reused
    seq_id = driver.begin(second)
    stats = driver.cache.stats
    assert (stats.reused_pages, stats.copied_pages) == (num_shared, 3 - num_shared)
    own_page = driver.cache.pages(seq_id)[2]
    driver.store(seq_id, 12)
    assert driver.cache.pages(seq_id)[2] == own_page
    driver.free(seq_id)
    for tokens in (first, second):
        assert driver.cache.match([*tokens, 9]) == 14 - lookahead
    assert driver.cache.match([*common, 50]) == driver.cache.match([*common, 60]) == 12
    driver.check()


def test_with_lookahead_a_page_is_stored_when_the_token_after_it_is_known() -> None:
    driver = Driver(num_pages=10, page_size=2, lookahead=1)
    seq_id = driver.begin([1, 2, 3, 4])
    driver.store(seq_id, 4)
    assert driver.cache.match([1, 2, 3, 4, 5]) == 2
    driver.grow(seq_id, accepted=[5], rejected=[])
    driver.store(seq_id, 4)
    assert driver.cache.match([1, 2, 3, 4, 5]) == 4
    assert len(driver.cache.private_pages(seq_id)) == 0
    with pytest.raises(AssertionError, match="shared pages"):
        driver.cache.rewind(seq_id, 3)


def test_with_lookahead_a_partial_page_serves_all_but_its_last_known_token() -> None:
    driver = Driver(num_pages=10, page_size=4, lookahead=1)
    driver.run([1, 2, 3, 4, 5, 6])
    assert driver.cache.match([1, 2, 3, 4, 5, 6, 7]) == 5
    assert driver.cache.match([1, 2, 3, 4, 5, 9, 7]) == 4
    driver.run([1, 2, 3, 4, 5, 6, 7])
    assert driver.cache.match([1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert driver.cache.num_available == 9


def test_with_lookahead_a_single_token_is_nothing_to_reuse_or_to_copy() -> None:
    driver = Driver(num_pages=10, page_size=4, lookahead=1)
    driver.run([1])
    assert list(driver.cache._tree.nodes()) == []
    driver.run([1, 2, 3])
    assert driver.cache.match([1, 9, 9]) == 0
    driver.begin([1, 9, 9])
    assert driver.device.copies == []
    driver.check()


def test_with_lookahead_prompts_side_by_side_share_a_page_if_the_token_after_it_is_the_same() -> (
    None
):
    driver = Driver(num_pages=10, page_size=2, lookahead=1)
    texts = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 5]]
    first, second, third = [driver.begin(text) for text in texts]
    for seq_id in (first, second, third):
        driver.store(seq_id, 4)
    pages = [driver.cache.pages(seq_id) for seq_id in (first, second, third)]
    assert pages[0][:2] == pages[2][:2]
    assert pages[0][0] == pages[1][0] and pages[0][1] != pages[1][1]
    driver.check()


def test_matching_has_no_side_effect() -> None:
    driver = Driver(num_pages=4, page_size=2)
    driver.run([1, 2])
    driver.run([5, 6])
    assert driver.cache.match([1, 2, 3]) == 2
    assert driver.cache.new_pages_needed([1, 2, 3], 3) == [2]
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
    available = driver.cache.num_available
    driver.note(second)
    driver.store(first, 5)
    driver.store(second, 5)
    assert driver.cache.pages(first)[:2] == driver.cache.pages(second)[:2]
    assert driver.cache.pages(first)[2:] == driver.cache.private_pages(first)
    assert driver.cache.private_pages(first) != driver.cache.private_pages(second)
    assert driver.cache.num_available == available + 2
    assert driver.num_known(second) == 0
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


def test_no_page_of_a_restarted_sequence_is_known() -> None:
    driver = Driver(num_pages=4, page_size=2)
    seq_id = driver.begin([1, 2, 3])
    driver.note(seq_id)
    driver.free(seq_id)
    driver.cache.add_sequence(seq_id, [1, 2, 3])
    assert driver.num_known(seq_id) == 0 and len(driver.cache.pages(seq_id)) == 1


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda cache: cache.pages(1).pop(), "are not the 5 pages"),
        (lambda cache: cache.pages(1).append(cache.pages(2)[-1]), "each once"),
        (lambda cache: cache.pages(1).__setitem__(0, cache.pages(2)[-1]), "is not the tree's"),
        (lambda cache: cache.sequences[1].nodes.pop(), "counts 1 holders and has 0"),
    ],
)
def test_the_integrity_check_names_a_page_that_is_lost_or_held_twice(damage, sentence) -> None:
    cache = cache_of(6, 2, lambda source, destination: None)
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
    cache = cache_of(10, 4, lambda source, destination: None)
    cache.add_sequence(1, [])
    assert cache.extend(1, 36)
    for num_tokens, pages_read in [(16, [0, 4, 8, 12]), (19, []), (24, [16, 20])]:
        cache.store(1, Recorder(range(num_tokens)))
        assert starts == pages_read
        starts.clear()


def test_matching_a_long_prompt_reads_each_of_its_tokens_once() -> None:
    class Counted(list[int]):
        num_read = 0

        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            self.num_read += len(found)
            return found

    cache = cache_of(300, 32, lambda source, destination: None)
    prompt = Counted(range(8192))
    cache.add_sequence(1, prompt)
    assert cache.extend(1, 8192)
    cache.free(1, prompt)
    prompt.num_read = 0
    assert cache.match(prompt) == 8191
    assert prompt.num_read <= 8192
