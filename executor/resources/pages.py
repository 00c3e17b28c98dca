"""What the paged cache keeps of groups, of sequences and of its use."""

from collections.abc import Callable
from dataclasses import dataclass

from tllm_spec.executor.resources.radix import Node
from tllm_spec.kernels.key_spans import KeySpan


@dataclass(frozen=True)
class PageGroup:
    """The pages of one layer group. `copy_page(source, destination)` copies a page; the copies must
    take effect in the order of the calls and before the next forward. span: the keys that a query
    sees; None: all up to its own."""

    num_pages: int
    copy_page: Callable[[int, int], None]
    span: KeySpan | None = None


@dataclass
class CacheStats:
    """Counters since the start, of the prompts given to `add_sequence`. A page counts once for all
    groups, except where it is evicted."""

    reused_tokens: int = 0  # as `reported_len` counts them
    missed_tokens: int = 0
    reused_pages: int = 0  # shared by reference
    copied_pages: int = 0  # partial matches
    missed_pages: int = 0
    evicted_pages: int = 0

    def add(
        self, num_tokens: int, num_pages: int, cached_len: int, num_shared: int, num_copied: int
    ) -> None:
        """Counts a prompt."""
        self.reused_tokens += cached_len
        self.missed_tokens += num_tokens - cached_len
        self.reused_pages += num_shared
        self.copied_pages += num_copied
        self.missed_pages += num_pages - num_shared - num_copied


@dataclass(slots=True)
class SequencePages:
    """A sequence's pages in one group, in order. `NO_PAGE` before index `first`: they are no longer
    seen. The first `num_known` entries are as the owner of a copy has last seen them; the owner
    sets it, changes lower it."""

    pages: list[int]
    first: int = 0
    num_known: int = 0

    def changed(self, index: int) -> None:
        """Notes that the entries from `index` on have changed."""
        self.num_known = min(self.num_known, index)


@dataclass(slots=True)
class CachedSequence:
    """A sequence's pages in all groups."""

    groups: list[SequencePages]  # all with the same number of pages
    nodes: list[Node]  # the tree nodes of the first pages; the pages after them are private
    root: Node  # of the tree, before the nodes

    @property
    def end(self) -> Node:
        """The last node, or the root."""
        return self.nodes[-1] if self.nodes else self.root

    @property
    def num_pages(self) -> int:
        return len(self.groups[0].pages)

    @property
    def firsts(self) -> list[int]:
        return [own.first for own in self.groups]

    def private_pages(self, group: int) -> list[int]:
        """The pages after those in the tree."""
        own = self.groups[group]
        return own.pages[max(len(self.nodes), own.first) :]
