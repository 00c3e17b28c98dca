"""Prompt-lookup drafts in the shape of a tree: the newest continuations of the last tokens, those
of longer matches first.

As `ngram_pool.py`, but an n-gram has its last `MAX_OCCURRENCES` occurrences, not one. Continuations
that begin equally share nodes. A continuation that has no room ends where the room does, so a tree
always has all that a chain of the newest continuation would have."""

from itertools import chain, islice
from typing import Any

from tllm_spec.executor.resources.ngram_pool import _POSITION, _TEXT, OWN, NGramIndex, NGramPool

# Of an n-gram; a bound on the work of one lookup.
MAX_OCCURRENCES = 8


class OccurrencesIndex(NGramIndex):
    """A node is a dict as soon as its n-gram has occurred twice. Its occurrences are a list then,
    the newest last, which is cut when it is twice too long."""

    def insert(self, base: int, tokens: list[int], start: int, stop: int) -> int:
        """As `NGramIndex.insert`, whose result trees do not need: 0."""
        start = self.make_room(base, tokens, start, stop)
        root, size = self.root, self.max_ngram_size
        occurrence = base + start
        for last in range(start, stop):
            occurrence += 1
            node, index, first = root, last, max(last - size + 1, 0)
            while True:
                token = tokens[index]
                child = node.get(token)
                if child is None:
                    node[token] = occurrence
                    break
                if type(child) is dict:
                    own = child[OWN]
                    own.append(occurrence)
                    if len(own) == 2 * MAX_OCCURRENCES:
                        del own[:MAX_OCCURRENCES]
                    node = child
                else:
                    node[token] = node = {OWN: [child, occurrence]}
                    length = last - index + 1
                    before = (child & _POSITION) - length - 1
                    if before >= 0 and length < size:
                        node[self.texts[child & _TEXT][before]] = child
                if index == first:
                    break
                index -= 1
        return 0

    def matches(self, tokens: list[int]) -> list[tuple[list[int], int]]:
        """Up to `MAX_OCCURRENCES` occurrences of n-grams at the end of `tokens`, longest first,
        then newest first, each once: the text, and where its continuation begins."""
        node, found = self.root, list[list[int]]()
        for token in tokens[: -self.max_ngram_size - 1 : -1]:
            child: Any = node.get(token)
            if child is None:
                break
            if type(child) is not dict:
                found.append([child])
                break
            found.append(child[OWN][: -MAX_OCCURRENCES - 1 : -1])
            node = child
        each_once = dict.fromkeys(chain.from_iterable(reversed(found)))
        return list(map(self.locate, islice(each_once, MAX_OCCURRENCES)))


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

    def propose_paths(self, request_id: int, tokens: list[int], depth: int) -> list[list[int]]:
        """Continuations of up to `depth` tokens, the best first. `tokens` as for `propose`."""
        index = self._updated(request_id, tokens).pool
        assert isinstance(index, OccurrencesIndex)
        matches = index.matches(tokens)
        if isinstance(index.older, OccurrencesIndex):
            matches += index.older.matches(tokens)
            # Of equal lengths, the newer half first.
            matches.sort(key=lambda match: -index.match_len(match[0], match[1], tokens))
        return [text[start : start + depth] for text, start in matches]
