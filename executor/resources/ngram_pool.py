"""Prompt-lookup drafts: what followed the last tokens of a text when they occurred before.

A pool maps n-grams (1 to `max_matching_ngram_size` tokens) to their continuation. It stores
occurrences, which are positions in the requests' own token lists, so a continuation grows with its
text at no cost. Of an n-gram's occurrences it stores only the one that the options propose:

* `is_keep_all`, `is_use_oldest`: the first one.
* `is_keep_all`, not `is_use_oldest`: the last one, even if only one token has followed it yet.
* not `is_keep_all`: the one with the longest continuation (at most `max_draft_len`), the first of
  equals. In one text that is the first one. A public pool stores an occurrence once
  `max_draft_len` tokens have followed it, so there it is the first one, too. Occurrences with a
  shorter continuation at the end of their text are not stored.

A private pool belongs to one request and ends with it. A public pool is shared and outlives
requests. It mixes users' texts: one user's tokens are proposed to others, who can infer them from
timing and acceptance figures. Only requests with the same salt share n-grams.

A pool, public or private, holds at most `max_pool_entries` entries. An entry is one position in a
text with all n-grams that end there, about 100 bytes. A public pool also keeps the texts that its
entries point to. When half of the entries are new, the older half is dropped at once. The module
knows neither acceptance nor the requests' limits."""

from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

# An occurrence is an integer: its text's number in the high bits, and in the low bits the position
# after the n-gram, where the continuation begins. It is never 0.
_POSITION_BITS = 32
POSITION_MASK = (1 << _POSITION_BITS) - 1
TEXT_MASK = ~POSITION_MASK
OWN = -1  # the key of a node's own occurrence; its children's keys are token ids, from 0 on


class NGramIndex:
    """N-grams in a tree for each salt, read backwards: the root's keys are last tokens, below them
    the tokens before.

    A child is an integer, its occurrence, as long as its n-gram has occurred once. Then it is a
    dict from preceding tokens to children, with the first or last occurrence under `OWN`. `older`
    is the older half of the entries, a tree that is only read."""

    def __init__(self, max_ngram_size: int, last_wins: bool, capacity: int) -> None:
        self.max_ngram_size = max_ngram_size
        self.last_wins = last_wins
        self.capacity = capacity  # entries in this tree; as many again may be in `older`
        self.num_entries = 0
        self.roots: dict[str | None, dict[int, Any]] = {}  # by salt; of int | dict, recursively
        self.texts: dict[int, list[int]] = {}
        self.older: NGramIndex | None = None

    def insert(
        self, base: int, tokens: list[int], start: int, stop: int, salt: str | None = None
    ) -> int:
        """Adds the n-grams that end with each of `tokens[start:stop]`; `base` is their text's
        number.

        Returns the occurrence that this tree had for the longest n-gram at the end of them, or 0.
        Its cost is the up to `max_ngram_size` nodes per token that it visits, each elsewhere in
        memory."""
        start = self.make_room(base, tokens, start, stop)
        root, last_wins = self.roots.setdefault(salt, {}), self.last_wins
        known, occurrence, node = 0, base + start, root
        last = start - 1
        first = last - self.max_ngram_size + 1
        for token in tokens[start:stop]:
            occurrence += 1
            last += 1
            first += 1
            node, index, known = root, last, 0
            while True:
                child = node.get(token)
                if child is None:
                    node[token] = occurrence
                    break
                if type(child) is dict:
                    if last_wins:
                        known = child[OWN]
                        child[OWN] = occurrence
                    node = child
                elif index == first:  # the largest n-grams have no children
                    known = child
                    if last_wins:
                        node[token] = occurrence
                    break
                else:
                    known = child
                    node[token] = node = {OWN: occurrence if last_wins else child}
                    before = (child & POSITION_MASK) - (last - index + 2)
                    if before >= 0:
                        node[self.texts[child & TEXT_MASK][before]] = child
                if not index:
                    break
                index -= 1
                token = tokens[index]
        return known or node.get(OWN, 0)

    def make_room(self, base: int, tokens: list[int], start: int, stop: int) -> int:
        """Counts the entries `tokens[start:stop]`. Returns the first for which there is room, from
        `start` on."""
        num_entries = self.num_entries + stop - start
        if num_entries > self.capacity:
            self._retire()
            start = max(start, stop - self.capacity)
            num_entries = stop - start
        self.num_entries = num_entries
        self.texts[base] = tokens
        return start

    def _retire(self) -> None:
        """This tree becomes the older half; the former older half is dropped."""
        older = self.older = type(self)(self.max_ngram_size, self.last_wins, self.capacity)
        older.roots, older.texts, older.num_entries = self.roots, self.texts, self.num_entries
        self.roots, self.texts, self.num_entries = {}, {}, 0

    def find(self, tokens: list[int], salt: str | None = None) -> int:
        """The occurrence of the longest n-gram at the end of `tokens` in the salt's tree, or 0."""
        node, known = self.roots.get(salt, {}), 0
        for token in tokens[: -self.max_ngram_size - 1 : -1]:
            child = node.get(token)
            if child is None:
                break
            if type(child) is not dict:
                return int(child)
            node, known = child, child[OWN]
        return known

    def locate(self, occurrence: int) -> tuple[list[int], int]:
        """An occurrence's text and where its continuation begins; an empty text for 0."""
        return (
            (self.texts[occurrence & TEXT_MASK], occurrence & POSITION_MASK)
            if occurrence
            else ([], 0)
        )

    def locate_in_both(
        self, known: int, tokens: list[int], salt: str | None = None
    ) -> tuple[list[int], int]:
        """`locate` for the longer match of the end of `tokens`: `known`, or that of the older
        half."""
        assert self.older is not None
        here, there = self.locate(known), self.older.locate(self.older.find(tokens, salt))
        longer = self.match_len(*there, tokens) - self.match_len(*here, tokens)
        return there if longer > 0 or (longer == 0 and not self.last_wins) else here

    def match_len(self, text: list[int], end: int, tokens: list[int]) -> int:
        """How many tokens before `text[end]` equal the last ones of `tokens`, up to the n-gram
        size."""
        size = min(self.max_ngram_size, end, len(tokens))
        while text[end - size : end] != tokens[len(tokens) - size :]:
            size -= 1
        return size


@dataclass(eq=False, slots=True)
class _Request:
    pool: NGramIndex
    base: int  # the number of its text, shifted to the high bits
    salt: str | None
    num_indexed: int = 0
    known: int = 0  # the pool's occurrence of the end of the text when that was inserted


class NGramPool:
    """Proposes drafts for requests, which it knows by their id and their growing token list."""

    index_kind: ClassVar[type[NGramIndex]] = NGramIndex

    def __init__(
        self,
        *,
        max_draft_len: int,
        max_matching_ngram_size: int,
        is_keep_all: bool,
        is_use_oldest: bool,
        is_public_pool: bool,
        max_pool_entries: int,
    ) -> None:
        self._max_draft_len = max_draft_len
        self._pool_options = (
            max_matching_ngram_size,
            is_keep_all and not is_use_oldest,
            max_pool_entries // 2,
        )
        self._public = self.index_kind(*self._pool_options) if is_public_pool else None
        # An n-gram at the end of a text has no continuation. A private pool inserts it anyway,
        # because the lookup is then the same walk through the tree. In a public pool other requests
        # would find it.
        self._lag = 0 if not is_public_pool else 1 if is_keep_all else max_draft_len
        self._requests: dict[int, _Request] = {}
        self._numbers = count()

    @property
    def num_entries(self) -> int:
        pools = (
            [self._public]
            if self._public
            else [request.pool for request in self._requests.values()]
        )
        return sum(
            pool.num_entries + (pool.older.num_entries if pool.older else 0) for pool in pools
        )

    def propose(
        self, request_id: int, tokens: list[int], draft_len: int, salt: str | None = None
    ) -> list[int]:
        """What followed an earlier occurrence of the longest n-gram at the end of `tokens`: 0 to
        `draft_len` tokens.

        `tokens` is the request's own list. It is not copied; it may only grow, and must not change
        after `free`."""
        request = self._updated(request_id, tokens, salt)
        pool = request.pool
        known = pool.find(tokens, salt) if self._lag else request.known
        if pool.older is not None:
            text, start = pool.locate_in_both(known, tokens, salt)
        elif known:
            text, start = pool.texts[known & TEXT_MASK], known & POSITION_MASK
        else:
            return []
        return text[
            start : start + (draft_len if draft_len < self._max_draft_len else self._max_draft_len)
        ]

    def _updated(self, request_id: int, tokens: list[int], salt: str | None) -> _Request:
        """The request, whose new tokens are indexed."""
        request = self._requests.get(request_id) or self._admit(request_id, salt)
        stop = len(tokens) - self._lag
        if stop > request.num_indexed:
            start, pool = request.num_indexed, request.pool
            request.known = pool.insert(request.base, tokens, start, stop, request.salt)
            request.num_indexed = stop
        return request

    def free(self, request_id: int) -> None:
        """The request has ended: its private pool is dropped. Its entries of a public pool stay."""
        self._requests.pop(request_id, None)

    def _admit(self, request_id: int, salt: str | None) -> _Request:
        pool = self._public or self.index_kind(*self._pool_options)
        base = next(self._numbers) << _POSITION_BITS
        request = self._requests[request_id] = _Request(pool, base, salt)
        return request
