"""Prompt-lookup drafts in the shape of a tree: the newest continuations of the last tokens, those
of longer matches first.

As `ngram_pool.py`, but an n-gram has its last `MAX_OCCURRENCES` occurrences, not one. Continuations
that begin equally share nodes. A continuation that has no room ends where the room does, so a tree
always has all that a chain of the newest continuation would have."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from tllm_spec.executor.resources.ngram_pool import OWN, NGramIndex, NGramPool

# Of an n-gram; a bound on the work of one lookup.
MAX_OCCURRENCES = 8


class OccurrencesIndex(NGramIndex):
    """A node is a dict as soon as its n-gram has occurred twice. Its occurrences are a list then,
    the newest last, which is cut when it is twice too long."""

    def insert(self, base: int, tokens: list[int], start: int, stop: int) -> int:
        """As `NGramIndex.insert`, whose result trees do not need: 0."""
        start = self.make_room(base, tokens, start, stop)
        for last in range(start, stop):
            self._insert_end(base + last + 1, tokens, last)
        return 0

    def _insert_end(self, occurrence: int, tokens: list[int], last: int) -> None:
        """Adds the n-grams that end with `tokens[last]`."""
        node = self.root
        for index in range(last, max(last - self.max_ngram_size, -1), -1):
            token = tokens[index]
            child: Any = node.get(token)
            if child is None:
                node[token] = occurrence
                return
            if type(child) is dict:
                own = child[OWN]
                own.append(occurrence)
                if len(own) == 2 * MAX_OCCURRENCES:
                    del own[:MAX_OCCURRENCES]
            else:
                known, child = child, {OWN: [child, occurrence]}
                node[token] = child
                text, end = self.locate(known)
                before, length = end - (last - index + 2), last - index + 1
                if before >= 0 and length < self.max_ngram_size:
                    child[text[before]] = known
            node = child

    def matches(self, tokens: list[int]) -> Iterator[tuple[list[int], int]]:
        """Occurrences of n-grams at the end of `tokens`, longest first, then newest first, each
        once: the text, and where its continuation begins."""
        node, found = self.root, list[list[int]]()
        for token in tokens[: -self.max_ngram_size - 1 : -1]:
            child: Any = node.get(token)
            if child is None:
                break
            if type(child) is not dict:
                found.append([child])
                break
            found.append(child[OWN][-MAX_OCCURRENCES:])
            node = child
        seen = set[int]()
        for occurrences in reversed(found):
            for occurrence in reversed(occurrences):
                if occurrence not in seen:
                    seen.add(occurrence)
                    yield self.locate(occurrence)


class NGramTreePool(NGramPool):
    """Proposes trees of at most `max_nodes` tokens and `topk` children of a node."""

    index_kind = OccurrencesIndex

    def __init__(
        self,
        *,
        max_nodes: int,
        topk: int,
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
        self._max_nodes, self._topk = max_nodes, topk
        self._lag = 1  # the end of a text has no continuation

    def propose_tree(
        self, request_id: int, tokens: list[int], depth: int
    ) -> tuple[list[int], list[int]]:
        """Tokens on paths of up to `depth`, and the parent of each: 0 for the last token of
        `tokens`, and n for the n-th token of the tree. `tokens` as for `propose`."""
        index = self._updated(request_id, tokens).pool
        assert isinstance(index, OccurrencesIndex)
        matches = list(islice(index.matches(tokens), MAX_OCCURRENCES))
        if isinstance(index.older, OccurrencesIndex):
            matches += islice(index.older.matches(tokens), MAX_OCCURRENCES)
            # Of equal lengths, the newer half first.
            matches.sort(key=lambda match: -index.match_len(match[0], match[1], tokens))
        return self._tree(text[start : start + depth] for text, start in matches)

    def _tree(self, continuations: Iterable[list[int]]) -> tuple[list[int], list[int]]:
        tokens, parents, children = list[int](), list[int](), [dict[int, int]()]
        for continuation in continuations:
            node = 0
            for token in continuation:
                child = children[node].get(token)
                if child is None:
                    if len(tokens) == self._max_nodes or len(children[node]) == self._topk:
                        break
                    tokens.append(token)
                    parents.append(node)
                    child = children[node][token] = len(tokens)
                    children.append({})
                node = child
        return tokens, parents
