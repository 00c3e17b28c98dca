"""The interface of what requests occupy: slots, KV pages, drafter pools, a user's resources."""

from array import array
from collections.abc import Iterable
from itertools import count

import torch

from tllm_spec.config.text_search import SHARED_WIDTH
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.kernels.drafts.suffix_match import NO_TOKEN, TextTable


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
        self._free = list(range(max_batch_size - 1, -1, -1))
        self._owner: dict[int, int] = {}  # slot -> request id

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self, request: LlmRequest) -> None:
        request.slot = self._free.pop()
        self._owner[request.slot] = request.request_id

    def free_resources(self, request: LlmRequest) -> None:
        if request.slot < 0:
            return
        assert self._owner.pop(request.slot) == request.request_id, (
            "a slot was freed by another request"
        )
        self._free.append(request.slot)
        request.slot = -1

    def check_integrity(self) -> None:
        assert len(self._free) + len(self._owner) == self.max_batch_size, (
            "slots: free + owned != total"
        )
        assert not set(self._free) & set(self._owner), "slots: a slot is both free and owned"


# Texts that requests of the same `cache_salt` share, as far as drafts are copied from them: those
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
        self._numbers: dict[str | None, int] = {}
        self._next_number = count()
        self._salts: dict[int, str | None] = {}  # of the table's slots and shared rows
        self._filled: dict[str | None, tuple[int, int]] = {}  # a row with room, and its tokens
        self._next_row = 0

    def start(self, request: LlmRequest) -> None:
        """Called when the request's text is in its slot."""
        self._mark(request.slot, request.cache_salt)

    def free_resources(self, request: LlmRequest) -> None:
        """Keeps pieces of a finished request's text. A preempted request comes back with its
        own."""
        assert self._table.salts is not None
        if request.slot >= 0:
            self._table.salts[request.slot].fill_(NO_SALT)
        if request.is_finished:
            for piece in pieces_of(request.tokens):
                self._add(piece, request.cache_salt)

    def _add(self, piece: list[int], salt: str | None) -> None:
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

    def _mark(self, row: int, salt: str | None) -> None:
        """Says on the device whose a row of the table is."""
        assert self._table.salts is not None
        self._salts[row] = salt
        if salt not in self._numbers:
            used = set(self._salts.values())
            self._numbers = {own: each for own, each in self._numbers.items() if own in used}
            self._numbers[salt] = next(self._next_number)
        self._table.salts[row].fill_(self._numbers[salt])
