"""Forwards of context chunks as CUDA graphs, one for each padded number of rows.

A short prompt then takes as long as the device needs for it, and not as long as the host needs to
launch hundreds of kernels. The padding is a chunk of the dummy slot."""

import logging
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from time import monotonic

import torch

from tllm_spec.attention.flashinfer import FlashInferContexts
from tllm_spec.attention.interface import AttentionBackend
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.memory_plan import DUMMY_PAGES
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import AttentionGroups, ContextChunk
from tllm_spec.executor.graphs.slot_graphs import Captured, GraphPool
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.kernels.attention.paged_prefill import PrefillLimits

logger = logging.getLogger(__name__)

MAX_CHUNKS = 8
# Rows of a graph. With more rows the GEMMs of an 8B model take longer than the host needs to launch
# them, and a graph gains nothing.
CONTEXT_ROWS = (64, *range(128, 1537, 128))


def context_rows(max_num_tokens: int, max_len: int) -> tuple[int, ...]:
    """The sizes that can be needed: a round has at most `max_num_tokens` rows, and the padding is
    positions of the dummy slot, of which there are `max_len`."""
    return tuple(size for size in CONTEXT_ROWS if size <= min(max_num_tokens, max_len))


class ContextGraphs:
    """The forward of short prompts as CUDA graphs. All sizes are captured at once. Raises
    ValueError when the memory does not suffice."""

    def __init__(
        self,
        engine: ModelEngine,
        backend: AttentionBackend,
        plans: FlashInferContexts,
        sizes: tuple[int, ...],
        dummy_slot: int,
        pool: GraphPool,
    ) -> None:
        self._engine, self._backend, self._plans = engine, backend, plans
        self._dummy_slot = dummy_slot
        num_pages = (MAX_CHUNKS + 1) * engine.rows.table.device_rows.shape[1]
        num_inputs = MAX_CHUNKS + 3 * max(sizes) + -(-num_pages // 2)
        self._inputs = torch.zeros(num_inputs, dtype=torch.int64, device=engine.rows.device)
        self._last_rows = self._inputs[:MAX_CHUNKS]
        self._rows = {size: self._inputs[MAX_CHUNKS:][: 3 * size].view(3, size) for size in sizes}
        self._pages = {
            size: self._inputs[MAX_CHUNKS + 3 * size :].view(torch.int32) for size in sizes
        }
        start, self._graphs = monotonic(), dict[tuple[int, bool], Captured[torch.Tensor]]()
        kinds = (False, True) if engine.adapters is not None else (False,)
        for size, adapted in product(sorted(sizes, reverse=True), kinds):
            engine.use_adapters(adapted)
            self._send([], size)
            try:
                self._graphs[size, adapted] = pool.capture(partial(self._forward, size))
            except torch.cuda.OutOfMemoryError as error:
                raise ValueError(
                    f"out of memory while the CUDA graph of {size} context rows was captured; "
                    "lower kv_cache_config.free_gpu_memory_fraction, or set "
                    "prefill_cuda_graph_backend to disabled"
                ) from error
        engine.use_adapters(False)
        self._sizes = sorted(sizes)
        number, seconds = len(self._graphs), monotonic() - start
        logger.info("%d CUDA graphs of contexts took %.1f s", number, seconds)

    def run(self, chunks: list[ContextChunk]) -> torch.Tensor | None:
        """Hidden states of each chunk's last row, `[C, H]`, which the next replay of any graph
        overwrites. None when no graph fits."""
        num_rows = sum(len(chunk.tokens) for chunk in chunks)
        size = next((size for size in self._sizes if size >= num_rows), None)
        if size is None or len(chunks) > MAX_CHUNKS:
            return None
        if not self._plans.fits([*(chunk.end for chunk in chunks), size - num_rows]):
            return None
        self._send(chunks, size)
        captured = self._graphs[size, self._engine.is_adapted]
        captured.graph.replay()
        return captured.result[: len(chunks)]

    def _send(self, chunks: list[ContextChunk], size: int) -> None:
        """Writes what the graph of `size` rows reads, in one copy: the last row of each chunk;
        token ids, positions and KV slots of all rows; the pages of all chunks, two per number."""
        ends, builder = [*accumulate(len(chunk.tokens) for chunk in chunks)], self._engine.rows
        padding = [ContextChunk(self._dummy_slot, 0, [0] * (size - sum(ends[-1:])))]
        padding += [ContextChunk(self._dummy_slot, 0, [])] * (MAX_CHUNKS - len(chunks))
        chunks = chunks + padding
        pages = builder.pages(chunks)
        numbers = array("q", [end - 1 for end in ends] + [0] * (MAX_CHUNKS - len(ends)))
        numbers += builder.context_rows(chunks, size)
        numbers.frombytes(pages.tobytes() + bytes(4 * (len(pages) % 2)))
        to_device(numbers, builder.device, self._inputs[: len(numbers)])
        lens, kv_lens = [len(chunk.tokens) for chunk in chunks], [chunk.end for chunk in chunks]
        self._plans.update(lens, kv_lens, self._pages[size][: len(pages)])
        if self._engine.is_adapted:
            self._engine.write_adapters(chunks, None)

    def _forward(self, size: int) -> torch.Tensor:
        token_ids, positions, kv_slots = self._rows[size].unbind(0)
        attention = self._backend, self._plans.for_graph(kv_slots)
        return self._engine.run(token_ids, positions, (attention,), self._last_rows)


def capture_contexts(
    engine: ModelEngine, sizes: tuple[int, ...], dummy_slot: int, pool: GraphPool
) -> ContextGraphs | None:
    """None where attention cannot be captured, or there is no size. The graphs have the rows of one
    block table, so there are none for a model with several layer groups, or with layers that have a
    recurrent state."""
    attention = engine.attention
    if not sizes or len(attention.groups) > 1 or attention.memory is not None:
        return None
    [group] = attention.groups
    num_pages = engine.rows.table.device_rows.shape[1]
    plans = group.backend.context_plans(PrefillLimits(sizes[-1], MAX_CHUNKS + 1, num_pages))
    if plans is None:
        return None
    return ContextGraphs(engine, group.backend, plans, sizes, dummy_slot, pool)


# Slots that look like running requests with long contexts, so that rounds can be timed before the
# first request. All pages are free at that time.


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
