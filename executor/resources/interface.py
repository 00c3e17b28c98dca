"""The interface of what requests occupy: slots, KV pages, drafter pools, a user's resources. Slots,
the pages of slots on the device, and what the paged cache keeps of groups and of sequences."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.radix import NO_PAGE, Node, RadixTree
from tllm_spec.kernels.attention.visible_keys import KeySpan
from tllm_spec.kernels.drafts.suffix_match import NO_TOKEN, TextTable
from tllm_spec.lora_request import CacheSalt


class ResourceManager:
    """What requests hold while they run, such as slots or pages. Called in every round, in the
    order of the executor's list. Every method has a default, so a user's manager overrides only
    what it needs."""

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """After scheduling, before drafting: make room for this round's tokens, placeholder drafts
        included."""

    def update_resources(self, batch: ScheduledBatch) -> None:
        """After the round was read: free what rejected drafts occupied, which is everything after
        a request's first `kv_len` tokens."""

    def free_resources(self, request: LlmRequest) -> None:
        """The request is finished, cancelled, failed or preempted; it may never have been
        prepared."""

    def check_integrity(self) -> None:
        """Raises AssertionError when a conservation law is broken."""


# Slots: the row that a running request owns in every device tensor of per-request state.


class SeqSlotManager(ResourceManager):
    """Hands out `max_batch_size` slots, lowest first. One more row, `dummy_slot`, is for padding
    requests."""

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.dummy_slot = max_batch_size
        self.free = list(range(max_batch_size - 1, -1, -1))
        self._owner: dict[int, int] = {}  # slot -> request id

    def acquire(self, request: LlmRequest) -> None:
        request.slot = self.free.pop()
        self._owner[request.slot] = request.request_id

    def free_resources(self, request: LlmRequest) -> None:
        if request.slot < 0:
            return
        assert self._owner.pop(request.slot) == request.request_id, (
            "a slot was freed by another request"
        )
        self.free.append(request.slot)
        request.slot = -1

    def check_integrity(self) -> None:
        assert len(self.free) + len(self._owner) == self.max_batch_size, (
            "slots: free + owned != total"
        )
        assert not set(self.free) & set(self._owner), "slots: a slot is both free and owned"


# Texts that requests of the same salt share, as far as drafts are copied from them: those
# of running requests, and pieces of finished ones, of which the oldest are dropped first.
#
# They are on the device (`TextTable`); here is which of its rows belongs to whom. It mixes users'
# texts: one user's tokens are proposed to others, who can infer them from timing and acceptance
# figures.


NO_SALT = -1
OVERLAP = 64  # tokens that begin a piece and end the one before: matches are found on both sides


def pieces_of(tokens: list[int]) -> list[list[int]]:
    """Pieces of a text that fit a row. A text of one token has none: nothing follows it."""
    longest = SHARED_WIDTH - 1
    firsts = range(0, max(1, len(tokens) - OVERLAP), longest - OVERLAP)
    return [tokens[first : first + longest] for first in firsts] if len(tokens) > 1 else []


def rows_of(texts: Iterable[list[int]]) -> list[list[int]]:
    """Rows of the pieces of texts, with NO_TOKEN after each piece."""
    rows: list[list[int]] = []
    for piece in (piece for text in texts for piece in pieces_of(text)):
        if not rows or len(rows[-1]) + len(piece) >= SHARED_WIDTH:
            rows.append([])
        rows[-1] += [*piece, NO_TOKEN]
    return rows


class SharedTexts(ResourceManager):
    """Fills the first `num_rows` of the table's shared rows when requests finish. A row has texts
    of one salt."""

    def __init__(self, table: TextTable, num_rows: int) -> None:
        self._table, self._num_slots = table, len(table.kv_lens)
        self._num_rows = num_rows
        self._numbers: dict[CacheSalt, int] = {}
        self._next_number = count()
        self._salts: dict[int, CacheSalt] = {}  # of the table's slots and shared rows
        self._filled: dict[CacheSalt, tuple[int, int]] = {}  # a row with room, and its tokens
        self._next_row = 0

    def start(self, request: LlmRequest) -> None:
        """Called when the request's text is in its slot."""
        self._mark(request.slot, request.salt)

    def free_resources(self, request: LlmRequest) -> None:
        """Keeps pieces of a finished request's text. A preempted request comes back with its
        own."""
        assert self._table.salts is not None
        if request.slot >= 0:
            self._table.salts[request.slot].fill_(NO_SALT)
        if request.is_finished:
            for piece in pieces_of(request.tokens):
                self._add(piece, request.salt)

    def _add(self, piece: list[int], salt: CacheSalt) -> None:
        row, filled = self._filled.get(salt, (0, SHARED_WIDTH))
        if filled + len(piece) >= SHARED_WIDTH:
            row, filled = self._next_row, 0
            self._next_row = (row + 1) % self._num_rows
            self._filled = {own: at for own, at in self._filled.items() if at[0] != row}
            self._table.shared[row].fill_(NO_TOKEN)
            self._mark(self._num_slots + row, salt)
        tokens = torch.frombuffer(array("i", piece), dtype=torch.int32)
        place = self._table.shared[row, filled : filled + len(piece)]
        to_device(tokens, place.device, place)
        self._filled[salt] = row, filled + len(piece) + 1

    def _mark(self, row: int, salt: CacheSalt) -> None:
        """Says on the device whose a row of the table is."""
        assert self._table.salts is not None
        self._salts[row] = salt
        if salt not in self._numbers:
            used = set(self._salts.values())
            self._numbers = {own: each for own, each in self._numbers.items() if own in used}
            self._numbers[salt] = next(self._next_number)
        self._table.salts[row].fill_(self._numbers[salt])


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

    def private_pages(self, group: int) -> list[int]:
        """The pages after those in the tree."""
        own = self.groups[group]
        return own.pages[max(len(self.nodes), own.first) :]


# Which cached prefixes have a copy of the recurrent states after them.
#
# A state cannot be taken back, so a prefix can only be reused up to such a copy. There is a fixed
# number of them; the least recently used one is replaced. This module knows numbers and nodes of
# the prefix tree: no tensors.


class Snapshots:
    """`number` copies, of prefixes that are multiples of `every` tokens. No request holds one: what
    a new request needs is copied from it at once."""

    def __init__(self, number: int, every: int) -> None:
        self.every = every
        self._number = number
        self._free = list(range(number))
        self._of = OrderedDict[Node, int]()  # least recently used first

    def __contains__(self, node: Node) -> bool:
        return node in self._of

    def use(self, node: Node) -> int:
        """The copy of the prefix that ends with the node, which has one."""
        self._of.move_to_end(node)
        return self._of[node]

    def take(self, node: Node) -> int | None:
        """The number of the copy that the states after the node are to be written to; None: they
        are there already."""
        if node in self._of:
            self._of.move_to_end(node)
            return None
        number = self._free.pop() if self._free else self._of.popitem(last=False)[1]
        self._of[node] = number
        return number

    def drop(self, node: Node) -> None:
        """The node has left the tree."""
        if (number := self._of.pop(node, None)) is not None:
            self._free.append(number)

    def check_integrity(self, cached: Iterable[Node]) -> None:
        """cached: all nodes of the tree. Raises AssertionError with a sentence about a copy that is
        lost or listed twice, or whose prefix is not cached."""
        assert not set(self._of) - set(cached), "a snapshot is of a prefix that is not cached"
        assert sorted([*self._free, *self._of.values()]) == list(range(self._number)), (
            f"{len(self._free)} free + {len(self._of)} used snapshots are not {self._number}"
        )


# Conservation of pages: each is free, private to one sequence, or in the prefix tree.


def check_pages(
    groups: Sequence[PageGroup],
    free_pages: Sequence[Sequence[int]],
    tree: RadixTree,
    sequences: Mapping[int, CachedSequence],
) -> None:
    """free_pages: of each group. Raises AssertionError with a sentence about a page that is lost,
    listed twice or miscounted."""
    tree.check_integrity()
    holders: Counter[Node] = Counter()
    for seq_id, sequence in sequences.items():
        holders.update(sequence.nodes)
        parent = sequence.root
        for node in sequence.nodes:
            assert node.parent is parent, (
                f"sequence {seq_id} holds the node of {node.key} but not its parent"
            )
            parent = node
    cached = list(tree.nodes())
    assert not set(holders) - set(cached), "a sequence holds a node that has left the tree"
    for node in cached:
        assert node.num_holders == holders[node], (
            f"the node of {node.key} counts {node.num_holders} holders and has {holders[node]}"
        )
    for group, own in enumerate(groups):
        private = _check_sequences(group, cached, sequences)
        in_tree = [node.pages[group] for node in cached if node.pages[group] != NO_PAGE]
        free, last = list(free_pages[group]), own.num_pages - 1
        assert sorted(free + private + in_tree) == list(range(1, last + 1)), (
            f"{len(free)} free + {len(in_tree)} cached + {len(private)} private pages are not the "
            f"{last} pages 1..{last}, each once"
        )


def _check_sequences(
    group: int, cached: Sequence[Node], sequences: Mapping[int, CachedSequence]
) -> list[int]:
    """The private pages of the sequences in one group."""
    private: list[int] = []
    users: Counter[Node] = Counter()
    for seq_id, sequence in sequences.items():
        own = sequence.groups[group]
        assert len(own.pages) == sequence.num_pages, f"groups of {seq_id} differ in length"
        assert not any(own.pages[: own.first]), f"{seq_id} has pages that it let go"
        private += sequence.private_pages(group)
        users.update(sequence.nodes[own.first :])
        for index, node in enumerate(sequence.nodes[own.first :], own.first):
            assert own.pages[index] == node.pages[group], (
                f"page {index} of sequence {seq_id} is not the tree's"
            )
    for node in cached:
        assert node.num_users[group] == users[node], (
            f"page {node.pages[group]} counts {node.num_users[group]} references and has "
            f"{users[node]} holders"
        )
    return private


class BlockTable:
    """`[S, P]` int32 page numbers on the device. Changed entries are sent once per round.

    Two neighbours are sent as one 64-bit number, the first in its low half (every host of CUDA is
    little-endian). Indices and values are then one list of 64-bit numbers, sent in one copy and
    written by one kernel. P is even for this: `max_pages` or one more.

    The host keeps a copy of the rows: it finds the KV slots of a prompt's tokens in a few numbers,
    for which the device would need many small kernels."""

    def __init__(self, slots: SeqSlotManager, max_pages: int, device: torch.device) -> None:
        num_rows = slots.dummy_slot + 1
        self._pairs_per_row = -(-max_pages // 2)
        self.device_rows = torch.zeros(
            (num_rows, 2 * self._pairs_per_row), dtype=torch.int32, device=device
        )
        self._pairs = self.device_rows.view(torch.int64)
        # With what is not sent yet. Live: do not change them.
        self.host_rows = [array("i", bytes(8 * self._pairs_per_row)) for _ in range(num_rows)]
        self._changed: dict[int, int] = {}  # index in the flattened pairs -> pair

    def write(self, slot: int, pages: list[int], first_changed: int) -> None:
        """Sets a slot's row. The pages before index `first_changed` are in it already."""
        first_pair = first_changed // 2
        changed = array("i", pages[2 * first_pair :])
        self.host_rows[slot][2 * first_pair : len(pages)] = changed
        if len(pages) % 2:
            changed.append(0)
        pairs = memoryview(changed).cast("b").cast("q")
        start = slot * self._pairs_per_row + first_pair
        self._changed.update(zip(range(start, start + len(pairs)), pairs, strict=True))

    def flush(self) -> None:
        """Sends the changed entries. Does nothing if there are none, as in most rounds."""
        if not self._changed:
            return
        sent = to_device(array("q", [*self._changed, *self._changed.values()]), self._pairs.device)
        indices, pairs = sent.chunk(2)
        self._pairs.put_(indices, pairs)
        self._changed.clear()

    def rows(self, slot_ids: torch.Tensor, num_pages: int) -> torch.Tensor:
        """The first `num_pages` pages of each slot, `[B, num_pages]`."""
        return self.device_rows[:, :num_pages].index_select(0, slot_ids)
