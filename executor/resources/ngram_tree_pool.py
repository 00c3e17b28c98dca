"""Prompt-lookup drafts in the shape of a tree: the newest continuations of the last tokens, those
of longer matches first.

As `ngram_pool.py`, but an n-gram has all its occurrences, not one, and the last `MAX_OCCURRENCES`
are proposed. Continuations that begin equally share nodes. A continuation that has no room ends
where the room does, so a tree always has all that a chain of the newest continuation would
have."""

from itertools import islice
from typing import Any

from tllm_spec.executor.resources.ngram_pool import (
    OWN,
    POSITION_MASK,
    TEXT_MASK,
    NGramIndex,
    NGramPool,
)

# An n-gram has at most so many; this bounds the work of one lookup.
MAX_OCCURRENCES = 8


class OccurrencesIndex(NGramIndex):
    """Its nodes have the newest occurrence of their n-gram. `links` lead from one to the next older
    one: those of a text have `max_ngram_size` numbers for each token, the first for the n-gram of
    one token that ends there; 0: there is none."""

    def __init__(self, max_ngram_size: int, last_wins: bool, capacity: int) -> None:
        super().__init__(max_ngram_size, last_wins, capacity)
        self.links: dict[int, list[int]] = {}

    def insert(
        self, base: int, tokens: list[int], start: int, stop: int, salt: str | None = None
    ) -> int:
        """As `NGramIndex.insert`, whose result trees do not need: 0."""
        start = self.make_room(base, tokens, start, stop)
        root, size = self.roots.setdefault(salt, {}), self.max_ngram_size
        links = self.links.setdefault(base, [])
        links += [0] * (stop * size - len(links))
        occurrence = base + start
        for last in range(start, stop):
            occurrence += 1
            node, index, link = root, last, last * size
            largest = link + size - 1
            while index >= 0 and link <= largest:
                token = tokens[index]
                child = node.get(token)
                if child is None:
                    node[token] = occurrence
                    break
                index -= 1
                if type(child) is dict:
                    links[link] = child[OWN]
                    child[OWN] = occurrence
                    node = child
                elif link == largest:  # the largest n-grams have no children
                    links[link] = child
                    node[token] = occurrence
                    break
                else:
                    links[link] = child
                    node[token] = node = {OWN: occurrence}
                    before = (child & POSITION_MASK) - (last - index + 1)
                    if before >= 0:
                        node[self.texts[child & TEXT_MASK][before]] = child
                link += 1
        return 0

    def _retire(self) -> None:
        super()._retire()
        assert isinstance(self.older, OccurrencesIndex)
        self.older.links, self.links = self.links, {}

    def matches(self, tokens: list[int], salt: str | None = None) -> list[tuple[list[int], int]]:
        """Up to `MAX_OCCURRENCES` occurrences of n-grams at the end of `tokens`, longest first,
        then newest first, each once: the text, and where its continuation begins."""
        node, newest = self.roots.get(salt, {}), list[int]()
        for token in tokens[: -self.max_ngram_size - 1 : -1]:
            child: Any = node.get(token)
            if child is None:
                break
            if type(child) is not dict:
                newest.append(child)
                break
            newest.append(child[OWN])
            node = child
        found: dict[int, None] = {}
        links, size = self.links, self.max_ngram_size
        for level in range(len(newest) - 1, -1, -1):
            occurrence, num_left = newest[level], MAX_OCCURRENCES
            while occurrence and num_left:
                found[occurrence] = None
                last = (occurrence & POSITION_MASK) - 1
                occurrence = links[occurrence & TEXT_MASK][last * size + level]
                num_left -= 1
            if len(found) >= MAX_OCCURRENCES:
                break
        return list(map(self.locate, islice(found, MAX_OCCURRENCES)))


class NGramTreePool(NGramPool):
    """Proposes paths, of which a drafter makes trees."""

    index_kind = OccurrencesIndex

    def __init__(
        self,
        *,
        max_draft_len: int,
        max_matching_ngram_size: int,
        is_public_pool: bool,
        max_pool_entries: int,
    ) -> None:
        super().__init__(
            max_draft_len=max_draft_len,
            max_matching_ngram_size=max_matching_ngram_size,
            is_keep_all=True,
            is_use_oldest=False,
            is_public_pool=is_public_pool,
            max_pool_entries=max_pool_entries,
        )
        self._lag = 1  # the end of a text has no continuation

    def propose_paths(
        self, request_id: int, tokens: list[int], depth: int, salt: str | None = None
    ) -> list[list[int]]:
        """Continuations of up to `depth` tokens, the best first. `tokens` as for `propose`."""
        index = self._updated(request_id, tokens, salt).pool
        assert isinstance(index, OccurrencesIndex)
        matches = index.matches(tokens, salt)
        if isinstance(index.older, OccurrencesIndex):
            matches += index.older.matches(tokens, salt)
            # The newer half comes first among equal lengths.
            matches.sort(key=lambda match: -index.match_len(match[0], match[1], tokens))
        return [text[start : start + depth] for text, start in matches]
