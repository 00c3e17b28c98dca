"""Slots that look like running requests with long contexts, so that rounds can be timed before the
first request. All pages are free at that time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tllm_spec.executor.engine.memory_plan import DUMMY_PAGES
from tllm_spec.executor.engine.rows import RowBuilder
from tllm_spec.executor.resources.slot_state import SlotState

CONTEXT_LEN = 1024
MIN_CONTEXT_LEN = 256  # shorter contexts add too little time to be measured


@dataclass(frozen=True)
class ContextLimits:
    """Tokens that a context may have, and that a round may write after it."""

    max_len: int
    room: int


class DummyContexts:
    """Contexts of dummy requests, within `limits`."""

    def __init__(
        self, slots: SlotState, rows: RowBuilder, num_pages: int, limits: ContextLimits
    ) -> None:
        self._slots, self._rows, self._limits = slots, rows, limits
        self._num_pages = num_pages - DUMMY_PAGES

    def length(self, batch_size: int) -> int:
        """Tokens of each context; 0 where there is no room for contexts that are long enough."""
        if batch_size >= len(self._slots.kv_lens):
            return 0
        available = self._num_pages // batch_size * self._rows.page_size - self._limits.room
        length = min(CONTEXT_LEN, self._limits.max_len, available)
        return length if length >= MIN_CONTEXT_LEN else 0

    @contextmanager
    def filled(self, batch_size: int) -> Iterator[Callable[[], None]]:
        """Inside, the first slots have contexts, each on its own pages. It yields a function that
        restores their lengths after a round."""
        length = self.length(batch_size)
        assert length
        count = -(-(length + self._limits.room) // self._rows.page_size)
        tables, kv_lens = (
            self._rows.table.device_rows[:batch_size],
            self._slots.kv_lens[:batch_size],
        )
        pages = (
            torch.arange(batch_size * count, dtype=torch.int32, device=tables.device) + DUMMY_PAGES
        )
        tables[:, :count] = pages.view(batch_size, count)

        def renew() -> None:
            kv_lens.fill_(length)

        renew()
        try:
            yield renew
        finally:
            tables.zero_()
            kv_lens.zero_()
