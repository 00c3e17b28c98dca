"""The bookkeeping of a paged KV cache: which pages each sequence has, and which are kept for reuse.

Each layer group has pages of its own. A page is on its group's free list, private to one sequence,
or in the radix tree (cached, and perhaps held by sequences). In each group a sequence's pages are a
path of the tree followed by private pages, and only private pages are written. In a group that sees
a span of the keys, a sequence releases the pages before the span. This module knows page numbers:
no requests, no slots, no tensors."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from tllm_spec.executor.resources.host_pages import HostPages
from tllm_spec.executor.resources.interface import (
    CachedSequence,
    CacheStats,
    PageGroup,
    SequencePages,
    Snapshots,
    check_pages,
)
from tllm_spec.executor.resources.kv_events import KVEventLog
from tllm_spec.executor.resources.radix import NO_PAGE, Key, Node, RadixTree, num_unreferenced
from tllm_spec.lora_request import AdapterSalt, CacheSalt


class _Prefix(NamedTuple):
    """The cached prefix of a prompt: full pages to share, then `num_copied` tokens of `source`,
    whose pages are to be copied. `firsts`: in each group the index of the first page that is
    seen after the prefix."""

    nodes: list[Node]
    source: Node | None
    num_copied: int
    firsts: list[int]


class PagedCache:
    """Pages for sequences, shared by common prefix. Unreferenced pages stay cached until evicted
    (LRU). Not thread-safe.

    Page 0 of a group is never handed out: padding rows write to it.

    Only sequences with the same salt share pages.

    `lookahead` (0 or 1) is how many tokens after its own the KV at a position depends on. Of n
    equal tokens only n - lookahead positions are equal, so only those are stored or reused."""

    def __init__(
        self,
        groups: Sequence[PageGroup],
        page_size: int,
        *,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        lookahead: int = 0,
        snapshots: Snapshots | None = None,
        host: HostPages | None = None,
    ) -> None:
        """snapshots: of recurrent states; a prefix is reused up to one of them only. None: the
        model has no such states. host: where evicted pages are kept; only if every group keeps all
        keys and there are no states."""
        assert lookahead in (0, 1), f"lookahead is {lookahead}"
        self.groups = groups
        self.page_size = page_size
        self.lookahead = lookahead
        self.stats = CacheStats()
        self._spans = [(i, own.span) for i, own in enumerate(groups) if own.span is not None]
        self.has_spans = bool(self._spans)  # whether some group releases pages
        self._reuse = enable_block_reuse
        self._partial_reuse = enable_block_reuse and enable_partial_reuse and snapshots is None
        self._free_pages = [list(range(own.num_pages - 1, 0, -1)) for own in groups]
        self._tree = RadixTree(page_size, lookahead, [own.span is None for own in groups])
        self.snapshots = snapshots
        if snapshots is not None:
            self._tree.on_leave.append(snapshots.drop)
        # Live: set `num_known` of their pages, change nothing else.
        self.sequences: dict[int, CachedSequence] = {}
        self._log: KVEventLog | None = None
        self.host = host
        assert host is None or not (self._spans or snapshots)

    def log_events(self) -> KVEventLog:
        """Gives `log` all changes of what is cached. The cache must be empty."""
        spans = [own.span for own in self.groups]
        log = KVEventLog(self.page_size, self._tree.is_current, self.lookahead, spans)
        self._log = log
        self._tree.on_change.append(log.changed)
        self._tree.on_leave.append(log.left)
        return log

    def available(self, group: int = 0) -> int:
        """Pages that can be allocated now: free ones, and cached ones without references."""
        return len(self._free_pages[group]) + self._tree.num_evictable(group)

    @property
    def num_available(self) -> int:
        """`available` of the group that has the fewest."""
        return min(map(self.available, range(len(self.groups))))

    def match(self, tokens: Sequence[int], salt: CacheSalt = None) -> int:
        """How many cached tokens `add_sequence(tokens)` would reuse now."""
        prefix = self._find_prefix(tokens, self._tree.root_of(salt))
        return len(prefix.nodes) * self.page_size + prefix.num_copied

    def reported_len(self, cached_len: int, salt: CacheSalt) -> int:
        """How much of a cached prefix answers and metrics report. Without a client's salt it is
        whole pages: with single tokens, a client could guess another one's prompt token by
        token."""
        own = salt.own if isinstance(salt, AdapterSalt) else salt
        return cached_len if own is not None else cached_len - cached_len % self.page_size

    def restore(self, tokens: Sequence[int], salt: CacheSalt = None) -> None:
        """Brings pages of the tokens' beginning back from host memory, as far as other cached pages
        make room. `match` finds them then, and what `add_sequence` and `extend` need is the
        same."""
        if self.host is not None and self._reuse:
            self.host.restore(self._tree, self._tree.root_of(salt), tokens, self._new_node)

    def _new_node(self, parent: Node, key: Key) -> Node | None:
        """A node with new pages; None if a group has none."""
        if not self.num_available:
            return None
        pages = [self._take_pages(group, 1)[0] for group in range(len(self.groups))]
        node, left_over = self._tree.insert(parent, key, pages)
        self._give_back(left_over)
        return node

    def new_pages_needed(
        self, tokens: Sequence[int], num_tokens: int, salt: CacheSalt = None
    ) -> list[int]:
        """Pages of each group by which `add_sequence(tokens)` and `extend(num_tokens)` would lower
        `available`.

        Matched pages without references count: holding them makes them unavailable."""
        nodes, source, _, firsts = self._find_prefix(tokens, self._tree.root_of(salt))
        num_new = max(self.pages_for(num_tokens) - len(nodes), int(source is not None))
        return [
            num_new + num_unreferenced(nodes[first:], group) for group, first in enumerate(firsts)
        ]

    def add_sequence(
        self, seq_id: int, tokens: Sequence[int], salt: CacheSalt = None, *, reuse: bool = True
    ) -> int:
        """Starts a sequence with its longest cached prefix and returns that prefix's length.

        It has at most `len(tokens) - 1` tokens, since the last one's logits are wanted. A partly
        matching page is copied."""
        assert seq_id not in self.sequences, f"sequence {seq_id} exists"
        root = self._tree.root_of(salt)
        nodes, source, num_copied, firsts = self._find_prefix(tokens if reuse else (), root)
        self._tree.hold(nodes, firsts)  # before an eviction could take the pages just matched
        if source is not None:
            self._tree.touch(source)  # evicted last, and _find_prefix made sure of another page
        groups = []
        for group, first in enumerate(firsts):
            own = [NO_PAGE] * first + [node.pages[group] for node in nodes[first:]]
            groups.append(SequencePages(own, first))
            if source is not None:
                own += self._take_pages(group, 1)
                self.groups[group].copy_page(source.pages[group], own[-1])
        self.sequences[seq_id] = CachedSequence(groups, nodes, root)
        cached_len = len(nodes) * self.page_size + num_copied
        stats, reported = self.stats, self.reported_len(cached_len, salt)
        num_copies = int(source is not None)
        stats.reused_tokens += reported
        stats.missed_tokens += len(tokens) - reported
        stats.reused_pages += len(nodes)
        stats.copied_pages += num_copies
        stats.missed_pages += self.pages_for(len(tokens)) - len(nodes) - num_copies
        return cached_len

    def start_version(self, version: int | str) -> None:
        """Called when the weights have changed: nothing that was stored before is reused. Sequences
        that run store for their own version."""
        self.reset()
        self._tree.start_version(version)
        if self._log is not None:
            self._log.clear()

    def extend(self, seq_id: int, num_tokens: int) -> bool:
        """Takes pages for the first `num_tokens` tokens; False, and nothing changed, if there are
        too few."""
        sequence = self.sequences[seq_id]
        missing = self.pages_for(num_tokens) - sequence.num_pages
        if missing <= 0:
            return True
        if missing > self.num_available:
            return False
        for group, own in enumerate(sequence.groups):
            own.pages += self._take_pages(group, missing)
        return True

    def rewind(self, seq_id: int, num_tokens: int) -> int:
        """Keeps the pages of the first `num_tokens` tokens; returns how many it frees in each
        group."""
        sequence, keep = self.sequences[seq_id], self.pages_for(num_tokens)
        assert num_tokens >= len(sequence.nodes) * self.page_size, (
            f"a rewind of {seq_id} cuts into shared pages"
        )
        num_freed = sequence.num_pages - keep
        if num_freed <= 0:
            return 0
        for group, own in enumerate(sequence.groups):
            assert keep >= own.first, f"a rewind of {seq_id} needs pages that are no longer held"
            self._free_pages[group].extend(own.pages[keep:])
            del own.pages[keep:]
            own.changed(keep)
        return num_freed

    def slide(self, seq_id: int, position: int) -> None:
        """Releases the pages that no query from `position` on sees. Those in the tree stay
        cached."""
        sequence = self.sequences[seq_id]
        for group, span in self._spans:
            own = sequence.groups[group]
            first = span.first_key(position) // self.page_size
            for index in range(own.first, first):
                if index < len(sequence.nodes):
                    self._tree.let_go(sequence.nodes[index], group)
                else:
                    self._free_pages[group].append(own.pages[index])
                own.pages[index] = NO_PAGE
            if first > own.first:
                own.changed(own.first)
                own.first = first

    def store(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Caches the full pages of `tokens`, the sequence's first ones, whose KV is final.

        With `lookahead` 1 the last token's KV is not stored: it only completes the key of the token
        before it. Costs only the pages not stored yet. Where an equal page is cached already, the
        sequence moves to it and frees its own: a holder of a node must hold the node's ancestors
        (see radix.py)."""
        sequence, size = self.sequences[seq_id], self.page_size
        num_stored = len(tokens) - self.lookahead
        assert num_stored <= sequence.num_pages * size, (
            f"sequence {seq_id} has no pages for {num_stored} tokens"
        )
        if not self._reuse:
            return
        for index in range(len(sequence.nodes), num_stored // size):
            key = tuple(tokens[index * size : (index + 1) * size + self.lookahead])
            pages = [own.pages[index] for own in sequence.groups]
            node, left_over = self._tree.insert(sequence.end, key, pages)
            # A node's page is not held where the sequence has let go of its own.
            self._tree.hold([node], [int(page == NO_PAGE) for page in pages])
            sequence.nodes.append(node)
            self._give_back(left_over)
            for own, page, stored in zip(sequence.groups, pages, node.pages, strict=True):
                if page not in (NO_PAGE, stored):
                    own.pages[index] = stored
                    own.changed(index)

    def free(self, seq_id: int, tokens: Sequence[int] = ()) -> None:
        """Ends the sequence. The KV of `tokens` is stored first (see `store`), a last partial page
        included."""
        self.store(seq_id, tokens)
        sequence = self.sequences.pop(seq_id)
        start = len(sequence.nodes)
        tail = tuple(tokens[start * self.page_size :])
        if 0 < len(tail) - self.lookahead < self.page_size and self._partial_reuse:
            pages = [own.pages[start] for own in sequence.groups]
            if NO_PAGE not in pages:
                _, left_over = self._tree.insert(sequence.end, tail, pages)
                self._give_back(left_over)
                start += 1
        for group, own in enumerate(sequence.groups):
            self._free_pages[group].extend(own.pages[max(start, own.first) :])
        self._tree.release(sequence.nodes, [own.first for own in sequence.groups])

    def cached_end(self, seq_id: int, num_tokens: int) -> Node | None:
        """The node that the sequence's first `num_tokens` tokens end with; None: they are not
        cached."""
        nodes, number = self.sequences[seq_id].nodes, num_tokens // self.page_size
        return nodes[number - 1] if 0 < number <= len(nodes) else None

    def pages(self, seq_id: int, group: int = 0) -> list[int]:
        """The sequence's pages in one group, in order. The live list: do not change it."""
        return self.sequences[seq_id].groups[group].pages

    def private_pages(self, seq_id: int, group: int = 0) -> list[int]:
        """The pages after those in the tree: only this sequence reads or writes them."""
        return self.sequences[seq_id].private_pages(group)

    def state(self) -> dict[str, Any]:
        """Page counts and counters as plain values. A page that a sequence holds counts as used,
        cached or not. The counts are those of the group with the smallest part available; with
        several groups `groups` has all of them."""
        counts = [self._counts(group) for group in range(len(self.groups))]
        scarcest = min(counts, key=lambda own: 1 - own["used"] / own["num_pages"])
        host = {} if self.host is None else {"host": self.host.state()}
        state = {**scarcest, "page_size": self.page_size, **asdict(self.stats), **host}
        return state if len(counts) == 1 else {**state, "groups": counts}

    def _counts(self, group: int) -> dict[str, int]:
        num_pages, free = self.groups[group].num_pages - 1, len(self._free_pages[group])
        cached = self._tree.num_evictable(group)
        used = num_pages - free - cached
        return {"num_pages": num_pages, "free": free, "cached": cached, "used": used}

    def reset(self) -> None:
        """Frees all cached pages that no sequence holds."""
        for group in range(len(self.groups)):
            while self._tree.num_evictable(group):
                self._give_back(self._tree.evict(group))
        if self.host is not None:
            self.host.clear()
        if self._log is not None and self._tree.is_empty:
            self._log.clear()

    def check_integrity(self) -> None:
        """Raises AssertionError with a sentence about a page that is lost, listed twice or
        miscounted."""
        check_pages(self.groups, self._free_pages, self._tree, self.sequences)
        if self.snapshots is not None:
            self.snapshots.check_integrity(self._tree.nodes())
        if self.host is not None:
            self.host.check_integrity()

    def _find_prefix(self, tokens: Sequence[int], root: Node) -> _Prefix:
        """The longest cached prefix from which every group can go on."""
        limit = max(len(tokens) - 1, 0)
        nodes = self._tree.match(root, tokens, limit) if self._reuse else []
        if self._spans or self.snapshots is not None:
            del nodes[self._num_resumable(nodes) :]
        end = nodes[-1] if nodes else root
        source, num_copied = self._find_source(tokens, end, len(nodes) * self.page_size, limit)
        firsts = self._firsts(len(nodes) * self.page_size + num_copied)
        # The copy needs a page that is neither matched nor its own source.
        if source is not None and any(
            self.available(group) <= num_unreferenced([*nodes[first:], source], group)
            for group, first in enumerate(firsts)
        ):
            return _Prefix(nodes, None, 0, self._firsts(len(nodes) * self.page_size))
        return _Prefix(nodes, source, num_copied, firsts)

    def _num_resumable(self, nodes: list[Node]) -> int:
        """The largest number of the nodes after which every group has the pages that the next query
        sees, and the states of all tokens so far are there."""
        found, size, snapshots = 0, self.page_size, self.snapshots
        runs = [0] * len(self._spans)  # pages in a row up to the latest node
        for number, node in enumerate(nodes, 1):
            enough = snapshots is None or node in snapshots
            for index, (group, span) in enumerate(self._spans):
                runs[index] = runs[index] + 1 if node.pages[group] != NO_PAGE else 0
                enough &= runs[index] >= number - span.first_key(number * size) // size
            if enough:
                found = number
        return found

    def _find_source(
        self, tokens: Sequence[int], end: Node, start: int, limit: int
    ) -> tuple[Node | None, int]:
        """The child of `end`, after `start` tokens, whose pages begin with more of the tokens, and
        how many."""
        if not self._partial_reuse:
            return None, 0
        tail = tuple(tokens[start : min(start + self.page_size, limit) + self.lookahead])
        source, num_common = self._tree.closest_child(end, tail)
        num_copied = num_common - self.lookahead
        if source is None or num_copied <= 0 or NO_PAGE in source.pages:
            return None, 0
        return source, num_copied

    def _firsts(self, position: int) -> list[int]:
        """In each group the index of the first page that a query at `position` sees."""
        firsts = [0] * len(self.groups)
        for group, span in self._spans:
            firsts[group] = span.first_key(position) // self.page_size
        return firsts

    def _take_pages(self, group: int, number: int) -> list[int]:
        free = self._free_pages[group]
        while len(free) < number:
            self.stats.evicted_pages += 1
            node = self._tree.next_evicted(group)
            if self.host is not None and self._tree.is_full(node):
                self.host.save(node)
            self._give_back(self._tree.evict(group))
        num_kept = len(free) - number
        taken = free[: num_kept - 1 if num_kept else None : -1]  # as if taken one by one
        del free[num_kept:]
        return taken

    def _give_back(self, pages: Sequence[int]) -> None:
        """pages: one of each group, or `NO_PAGE`."""
        for free, page in zip(self._free_pages, pages, strict=True):
            if page != NO_PAGE:
                free.append(page)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
