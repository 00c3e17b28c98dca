"""Slots that look like running requests with long contexts, so that rounds can be timed before the
first request. All pages are free at that time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tllm_spec.executor.engine.attention_groups import AttentionGroups
from tllm_spec.executor.engine.memory_plan import DUMMY_PAGES
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

    def __init__(self, slots: SlotState, attention: AttentionGroups, limits: ContextLimits) -> None:
        self._slots, self._groups, self._limits = slots, attention.groups, limits
        self._page_size = attention.rows.page_size

    def length(self, batch_size: int) -> int:
        """Tokens of each context; 0 where there is no room for contexts that are long enough."""
        if batch_size >= len(self._slots.kv_lens):
            return 0
        num_pages = min(group.backend.pool.num_pages for group in self._groups) - DUMMY_PAGES
        available = num_pages // batch_size * self._page_size - self._limits.room
        length = min(CONTEXT_LEN, self._limits.max_len, available)
        return length if length >= MIN_CONTEXT_LEN else 0

    @contextmanager
    def filled(self, batch_size: int) -> Iterator[Callable[[], None]]:
        """Inside, the first slots have contexts, each on its own pages. It yields a function that
        restores their lengths after a round."""
        length = self.length(batch_size)
        assert length
        count = -(-(length + self._limits.room) // self._page_size)
        tables = [group.rows.table.device_rows[:batch_size] for group in self._groups]
        kv_lens = self._slots.kv_lens[:batch_size]
        pages = torch.arange(batch_size * count, dtype=torch.int32, device=kv_lens.device)
        for table in tables:
            table[:, :count] = (pages + DUMMY_PAGES).view(batch_size, count)

        def renew() -> None:
            kv_lens.fill_(length)

        renew()
        try:
            yield renew
        finally:
            for table in tables:
                table.zero_()
            kv_lens.zero_()
