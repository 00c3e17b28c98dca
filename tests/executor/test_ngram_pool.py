"""NGramPool against a naive reading of its documented semantics, and each option by what it
changes."""

import random
import weakref
from typing import Any

import pytest

from tllm_spec.executor.resources.ngram_pool import NGramPool

OPTIONS: dict[str, Any] = {
    "max_draft_len": 3,
    "max_matching_ngram_size": 2,
    "is_keep_all": True,
    "is_use_oldest": True,
    "is_public_pool": False,
    "max_pool_entries": 1000,
}
OLDEST: dict[str, Any] = {"is_keep_all": True, "is_use_oldest": True}
NEWEST: dict[str, Any] = {"is_keep_all": True, "is_use_oldest": False}
LONGEST: dict[str, Any] = {"is_keep_all": False, "is_use_oldest": False}  # which has no say then


def make_pool(**options: Any) -> NGramPool:
    return NGramPool(**{**OPTIONS, **options})


def draft(tokens: list[int], draft_len: int = 3, **options: Any) -> list[int]:
    return make_pool(**options).propose(0, tokens, draft_len)


class Text(list[int]):
    """A list that can be watched."""


class NaivePool:
    """Every occurrence in the order in which it came, searched from the start at each proposal.

    `recent` holds the (text, end of n-gram) pairs of the newer half and `older` those of the half
    before."""

    def __init__(self, **options: Any) -> None:
        self.options = {**OPTIONS, **options}
        public, keep_all = self.options["is_public_pool"], self.options["is_keep_all"]
        self.min_continuation = (
            self.options["max_draft_len"] if public and not keep_all else 1 if public else 0
        )
        self.pools: dict[Any, list[list[tuple[list[int], int]]]] = {}
        self.num_indexed: dict[int, int] = {}

    def propose(self, request_id: int, tokens: list[int], draft_len: int) -> list[int]:
        halves = self.pools.setdefault(
            "all" if self.options["is_public_pool"] else request_id, [[], []]
        )
        start, stop = self.num_indexed.get(request_id, 0), len(tokens) - self.min_continuation
        half = self.options["max_pool_entries"] // 2
        if stop > start:
            new = [(tokens, end) for end in range(start + 1, stop + 1)]
            if len(halves[1]) + len(new) > half:
                halves[:] = [halves[1], []]
            halves[1] += new[-half:]
            self.num_indexed[request_id] = stop
        for size in range(self.options["max_matching_ngram_size"], 0, -1):
            found = [
                text[end:]
                for text, end in halves[0] + halves[1]
                if self.matches(text, end, tokens, size)
            ]
            if found:
                return self.choose(found)[: min(draft_len, self.options["max_draft_len"])]
        return []

    def matches(self, text: list[int], end: int, tokens: list[int], size: int) -> bool:
        return (
            size <= end < len(text)
            and len(tokens) >= size
            and text[end - size : end] == tokens[-size:]
        )

    def choose(self, found: list[list[int]]) -> list[int]:
        if self.options["is_keep_all"]:
            return found[0] if self.options["is_use_oldest"] else found[-1]
        return max(found, key=lambda text: min(len(text), self.options["max_draft_len"]))

    def free(self, request_id: int) -> None:
        self.num_indexed.pop(request_id, None)
        if not self.options["is_public_pool"]:
            self.pools.pop(request_id, None)


@pytest.mark.parametrize("choice", [OLDEST, NEWEST, LONGEST], ids=["oldest", "newest", "longest"])
@pytest.mark.parametrize("is_public_pool", [False, True], ids=["private", "public"])
@pytest.mark.parametrize("max_pool_entries", [100_000, 40, 7])
def test_every_draft_follows_the_documented_semantics(
    choice: dict[str, Any], is_public_pool: bool, max_pool_entries: int
) -> None:
    rng = random.Random(5)
    num_drafts = 0
    for _ in range(12):
        options = {
            **choice,
            "is_public_pool": is_public_pool,
            "max_pool_entries": max_pool_entries,
            "max_draft_len": rng.randint(1, 5),
            "max_matching_ngram_size": rng.randint(1, 5),
        }
        pool, naive = make_pool(**options), NaivePool(**options)
        vocab_size, texts = rng.choice((1, 2, 3, 8)), {request_id: [0] for request_id in range(4)}
        for _ in range(60):
            request_id = rng.randrange(4)
            if rng.random() < 0.05:
                pool.free(request_id), naive.free(request_id)
                texts[request_id] = [0]
            tokens, draft_len = texts[request_id], rng.randint(0, 6)
            tokens += rng.choices(range(vocab_size), k=rng.choice((0, 1, 1, 2, 5, 20)))
            expected = naive.propose(request_id, tokens, draft_len)
            assert pool.propose(request_id, tokens, draft_len) == expected, (options, texts)
            num_drafts += bool(expected)
    assert num_drafts > 200


def test_max_matching_ngram_size_is_the_longest_suffix_that_is_looked_up() -> None:
    tokens = [7, 1, 2, 30, 8, 1, 2, 40, 9, 2, 50, 8, 1, 2]
    assert draft(tokens, draft_len=1, max_matching_ngram_size=3) == [40]
    assert draft(tokens, draft_len=1, max_matching_ngram_size=2) == [30]
    assert draft(tokens, draft_len=1, max_matching_ngram_size=1, is_use_oldest=False) == [50]


def test_is_use_oldest_chooses_between_the_first_and_the_last_occurrence() -> None:
    tokens = [1, 10, 11, 1, 20, 21, 1, 30, 31, 1]
    assert draft(tokens, draft_len=2, is_use_oldest=True) == [10, 11]
    assert draft(tokens, draft_len=2, is_use_oldest=False) == [30, 31]


def test_without_is_keep_all_the_occurrence_with_a_full_draft_wins_over_the_newest() -> None:
    tokens = [1, 2, 3, 4, 1, 9, 1]
    assert draft(tokens, is_use_oldest=False) == [9, 1]
    assert draft(tokens, is_use_oldest=False, is_keep_all=False) == [2, 3, 4]


def test_a_public_pool_proposes_continuations_of_requests_that_have_ended() -> None:
    for is_public_pool, expected in ((True, [3, 4]), (False, [])):
        pool = make_pool(is_public_pool=is_public_pool)
        pool.propose(0, [1, 2, 3, 4], 3)
        pool.free(0)
        assert pool.propose(1, [1, 2], 3) == expected


def test_a_private_pool_is_empty_after_its_request_and_a_freed_id_starts_anew() -> None:
    pool = make_pool()
    pool.propose(0, [1, 2, 3, 1], 3)
    assert pool.num_entries == 4
    pool.free(0)
    pool.free(0)
    assert pool.num_entries == 0
    assert pool.propose(0, [2], 3) == []


@pytest.mark.parametrize("is_public_pool", [False, True])
def test_the_limit_holds_and_the_newest_half_of_it_survives(is_public_pool: bool) -> None:
    pool = make_pool(max_pool_entries=50, is_public_pool=is_public_pool)
    tokens: list[int] = []
    for token in range(0, 1000, 2):
        tokens += [token, token + 1]
        pool.propose(0, tokens, 3)
        assert pool.num_entries <= 50
    assert pool.propose(0, [*tokens, tokens[-24]], 3) == tokens[-23:-20]
    assert pool.propose(0, [*tokens, tokens[-24], tokens[-60]], 3) == []


def test_a_public_pool_lets_go_of_texts_that_have_no_entries_left() -> None:
    pool = make_pool(is_public_pool=True, max_pool_entries=40)
    watched = []
    for request_id in range(30):
        tokens = Text(range(10 * request_id, 10 * request_id + 10))
        pool.propose(request_id, tokens, 3)
        pool.free(request_id)
        watched.append(weakref.ref(tokens))
        del tokens
    alive = [number for number, text in enumerate(watched) if text() is not None]
    assert alive and min(alive) >= 25


@pytest.mark.parametrize("options", [OLDEST, NEWEST, LONGEST])
@pytest.mark.parametrize("max_pool_entries", [1000, 48])
def test_a_public_pool_is_shared_by_requests_with_the_same_salt_only(
    options: dict[str, Any], max_pool_entries: int
) -> None:
    pool = make_pool(is_public_pool=True, max_pool_entries=max_pool_entries, **options)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    for request_id, salt in enumerate([None, "a"]):
        pool.propose(request_id, [*tokens[:3], 10 + request_id, *tokens], 3, salt)
    assert pool.propose(2, [9, 1, 2, 3], 1, "a") == pool.propose(3, [9, 1, 2, 3], 1, "a") != []
    assert pool.propose(4, [9, 1, 2, 3], 3, "b") == []
    assert pool.propose(5, [9, 1, 2, 3], 1) != pool.propose(6, [9, 1, 2, 3], 1, "b")
