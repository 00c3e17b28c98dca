"""The bookkeeping of a paged KV cache: which pages each sequence has, and which are kept for reuse.

A page is on the free list, private to one sequence, or in the radix tree (cached, and perhaps held
by sequences). A sequence's pages are a path of the tree followed by private pages, and only private
pages are written. This module knows page numbers: no requests, no slots, no tensors."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tllm_spec.executor.resources.radix import Key, Node, RadixTree


@dataclass
class CacheStats:
    """Counters since the start, of the prompts given to `add_sequence`."""

    reused_tokens: int = 0  # as `reported_len` counts them
    missed_tokens: int = 0
    reused_pages: int = 0  # shared by reference
    copied_pages: int = 0  # partial matches
    missed_pages: int = 0
    evicted_pages: int = 0


class _Prefix(NamedTuple):
    """The cached prefix of a prompt: full pages to share, then `num_copied` tokens of `source`,
    whose page is to be copied."""

    nodes: list[Node]
    source: Node | None
    num_copied: int


@dataclass(slots=True)
class _Sequence:
    pages: list[int]
    nodes: list[Node]  # the tree nodes of pages[:len(nodes)]; the pages after them are private
    root: Node  # of the tree, before the nodes
    version: int


class PagedCache:
    """Pages for sequences, shared by common prefix. Unreferenced pages stay cached until evicted
    (LRU). Not thread-safe.

    Page 0 is never handed out: padding rows write to it. `copy_page(source, destination)` copies a
    page; the copies must take effect in the order of the calls and before the next forward.

    Only sequences with the same salt share pages.

    `lookahead` (0 or 1) is how many tokens after its own the KV at a position depends on. Of n
    equal tokens only n - lookahead positions are equal, so only those are stored or reused."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        copy_page: Callable[[int, int], None],
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        lookahead: int = 0,
    ) -> None:
        assert lookahead in (0, 1), f"lookahead is {lookahead}"
        self.num_pages = num_pages
        self.page_size = page_size
        self.lookahead = lookahead
        self.stats = CacheStats()
        self._copy_page = copy_page
        self._reuse = enable_block_reuse
        self._partial_reuse = enable_block_reuse and enable_partial_reuse
        self._free_pages = list(range(num_pages - 1, 0, -1))
        self._tree = RadixTree(page_size, lookahead)
        self._sequences: dict[int, _Sequence] = {}
        self._last_version = 0

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: free ones, and cached ones without references."""
        return len(self._free_pages) + self._tree.num_evictable

    def match(self, tokens: Sequence[int], salt: str | None = None) -> int:
        """How many cached tokens `add_sequence(tokens)` would reuse now."""
        prefix = self._find_prefix(tokens, self._tree.root_of(salt))
        return len(prefix.nodes) * self.page_size + prefix.num_copied

    def reported_len(self, cached_len: int, salt: str | None) -> int:
        """How much of a cached prefix answers and metrics report. Without a salt it is whole pages:
        with single tokens, a client could guess another one's prompt token by token."""
        return cached_len if salt is not None else cached_len - cached_len % self.page_size

    def new_pages_needed(
        self, tokens: Sequence[int], num_tokens: int, salt: str | None = None
    ) -> int:
        """By how much `add_sequence(tokens)` and `extend(num_tokens)` would lower `num_available`.

        Matched pages without references count: holding them makes them unavailable."""
        nodes, source, _ = self._find_prefix(tokens, self._tree.root_of(salt))
        num_pages = max(self._pages_for(num_tokens), len(nodes) + (source is not None))
        return num_pages - len(nodes) + _num_unreferenced(nodes)

    def add_sequence(
        self, seq_id: int, tokens: Sequence[int], salt: str | None = None, *, reuse: bool = True
    ) -> int:
        """Starts a sequence with its longest cached prefix and returns that prefix's length.

        It has at most `len(tokens) - 1` tokens, since the last one's logits are wanted. A partly
        matching page is copied."""
        assert seq_id not in self._sequences, f"sequence {seq_id} exists"
        root = self._tree.root_of(salt)
        found = self._find_prefix(tokens, root) if reuse else _Prefix([], None, 0)
        nodes, source, num_copied = found
        self._tree.hold(nodes)  # before an eviction could take the pages just matched
        pages = [node.page for node in nodes]
        self._sequences[seq_id] = _Sequence(pages, nodes, root, self._new_version())
        if source is not None:
            self._tree.touch(source)  # evicted last, and _find_prefix made sure of another page
            pages.append(self._take_page())
            self._copy_page(source.page, pages[-1])
        cached_len = len(nodes) * self.page_size + num_copied
        reported = self.reported_len(cached_len, salt)
        self._count_reuse(len(tokens), reported, len(nodes), len(pages) - len(nodes))
        return cached_len

    def extend(self, seq_id: int, num_tokens: int) -> bool:
        """Takes pages for the first `num_tokens` tokens; False, and nothing changed, if there are
        too few."""
        pages = self._sequences[seq_id].pages
        if num_tokens <= len(pages) * self.page_size:
            return True
        missing = self._pages_for(num_tokens) - len(pages)
        if missing > self.num_available:
            return False
        num_kept = max(0, len(self._free_pages) - missing)
        pages += reversed(self._free_pages[num_kept:])  # as if they were taken one by one
        del self._free_pages[num_kept:]
        while num_tokens > len(pages) * self.page_size:
            pages.append(self._take_page())
        return True

    def rewind(self, seq_id: int, num_tokens: int) -> int:
        """Keeps the pages of the first `num_tokens` tokens; returns how many it frees."""
        sequence = self._sequences[seq_id]
        pages = sequence.pages
        assert num_tokens >= len(sequence.nodes) * self.page_size, (
            f"a rewind of {seq_id} cuts into shared pages"
        )
        if num_tokens > (len(pages) - 1) * self.page_size:
            return 0
        keep = self._pages_for(num_tokens)
        rejected = pages[keep:]
        del pages[keep:]
        self._free_pages.extend(rejected)
        sequence.version = self._new_version()
        return len(rejected)

    def store(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Caches the full pages of `tokens`, the sequence's first ones, whose KV is final.

        With `lookahead` 1 the last token's KV is not stored: it only completes the key of the token
        before it. Costs only the pages not stored yet. Where an equal page is cached already, the
        sequence moves to it and frees its own: a holder of a node must hold the node's ancestors
        (see radix.py)."""
        sequence, size = self._sequences[seq_id], self.page_size
        num_stored = len(tokens) - self.lookahead
        assert num_stored <= len(sequence.pages) * size, (
            f"sequence {seq_id} has no pages for {num_stored} tokens"
        )
        if not self._reuse:
            return
        for index in range(len(sequence.nodes), num_stored // size):
            key = tuple(tokens[index * size : (index + 1) * size + self.lookahead])
            self._store_page(sequence, index, key)

    def free(self, seq_id: int, tokens: Sequence[int] = ()) -> None:
        """Ends the sequence. The KV of `tokens` is stored first (see `store`), a last partial page
        included."""
        self.store(seq_id, tokens)
        private = self.private_pages(seq_id)
        sequence = self._sequences.pop(seq_id)
        nodes = sequence.nodes
        tail = tuple(tokens[len(nodes) * self.page_size :])
        num_left = len(tail) - self.lookahead
        if 0 < num_left < self.page_size and self._partial_reuse:
            _, left_over = self._tree.insert(_end(sequence.root, nodes), tail, private[0])
            private[:1] = [] if left_over is None else [left_over]
        self._free_pages.extend(private)
        self._tree.release(nodes)

    def pages(self, seq_id: int) -> list[int]:
        """The sequence's pages in order. The live list: read it, do not change it."""
        return self._sequences[seq_id].pages

    def private_pages(self, seq_id: int) -> list[int]:
        """The pages after those in the tree: only this sequence reads or writes them."""
        sequence = self._sequences[seq_id]
        return sequence.pages[len(sequence.nodes) :]

    def version(self, seq_id: int) -> int:
        """Changes whenever `pages(seq_id)` changes other than by appending, and by a restart."""
        return self._sequences[seq_id].version

    def state(self) -> dict[str, Any]:
        """Page counts and counters as plain values. A page that a sequence holds counts as used,
        cached or not."""
        free, cached = len(self._free_pages), self._tree.num_evictable
        return {
            "num_pages": self.num_pages - 1,
            "page_size": self.page_size,
            "free": free,
            "cached": cached,
            "used": self.num_pages - 1 - free - cached,
            **asdict(self.stats),
        }

    def reset(self) -> None:
        """Frees all cached pages that no sequence holds."""
        while self._tree.num_evictable:
            self._free_pages.append(self._tree.evict())

    def check_integrity(self) -> None:
        """Raises AssertionError with a sentence about a page that is lost, listed twice or
        miscounted."""
        self._tree.check_integrity()
        private: list[int] = []
        holders: Counter[Node] = Counter()
        for seq_id, sequence in self._sequences.items():
            private += self.private_pages(seq_id)
            holders.update(sequence.nodes)
            parent = sequence.root
            for index, node in enumerate(sequence.nodes):
                assert sequence.pages[index] == node.page, (
                    f"page {index} of sequence {seq_id} is not the tree's"
                )
                assert node.parent is parent, (
                    f"sequence {seq_id} holds page {node.page} but not its parent"
                )
                parent = node
        cached = list(self._tree.nodes())
        for node in cached:
            assert node.ref_count == holders[node], (
                f"page {node.page} counts {node.ref_count} references and has {holders[node]} "
                "holders"
            )
        assert not set(holders) - set(cached), "a sequence holds a page that has left the tree"
        pages = sorted(self._free_pages + private + [node.page for node in cached])
        assert pages == list(range(1, self.num_pages)), (
            f"{len(self._free_pages)} free + {len(cached)} cached + {len(private)} private pages "
            f"are not the {self.num_pages - 1} pages 1..{self.num_pages - 1}, each once"
        )

    def _find_prefix(self, tokens: Sequence[int], root: Node) -> _Prefix:
        if not self._reuse:
            return _Prefix([], None, 0)
        limit = max(len(tokens) - 1, 0)
        nodes = self._tree.match(root, tokens, limit)
        if self._partial_reuse:
            start = len(nodes) * self.page_size
            tail = tuple(tokens[start : min(start + self.page_size, limit) + self.lookahead])
            source, num_common = self._tree.closest_child(_end(root, nodes), tail)
            num_copied = num_common - self.lookahead
            # The copy needs a page that is neither matched nor its own source.
            if (
                source
                and num_copied > 0
                and self.num_available > _num_unreferenced([*nodes, source])
            ):
                return _Prefix(nodes, source, num_copied)
        return _Prefix(nodes, None, 0)

    def _store_page(self, sequence: _Sequence, index: int, key: Key) -> None:
        own_page = sequence.pages[index]
        node, left_over = self._tree.insert(_end(sequence.root, sequence.nodes), key, own_page)
        self._tree.hold([node])
        sequence.nodes.append(node)
        if left_over is not None:
            self._free_pages.append(left_over)
        if node.page != own_page:
            sequence.pages[index] = node.page
            sequence.version = self._new_version()

    def _take_page(self) -> int:
        if self._free_pages:
            return self._free_pages.pop()
        self.stats.evicted_pages += 1
        return self._tree.evict()

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _new_version(self) -> int:
        self._last_version += 1
        return self._last_version

    def _count_reuse(
        self, num_tokens: int, cached_len: int, num_shared: int, num_copied: int
    ) -> None:
        stats = self.stats
        stats.reused_tokens += cached_len
        stats.missed_tokens += num_tokens - cached_len
        stats.reused_pages += num_shared
        stats.copied_pages += num_copied
        stats.missed_pages += self._pages_for(num_tokens) - num_shared - num_copied


def _end(root: Node, path: list[Node]) -> Node:
    return path[-1] if path else root


def _num_unreferenced(nodes: list[Node]) -> int:
    return sum(node.ref_count == 0 for node in nodes)
