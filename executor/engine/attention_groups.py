"""The attention of a model's layer groups: each has a backend and the rows over its block table."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from tllm_spec.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    GroupAttention,
)
from tllm_spec.attention.recurrent import RecurrentMemory, RecurrentRows
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.rows import ContextChunk, RowBuilder, Windows
from tllm_spec.kernels.attention.move_kv import move_kv
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.states.gated_delta import DeltaBlocks, DeltaRows

# What a draft network sees of long texts: the first tokens and the last ones, in whole pages.
#
# Attention knows of it by its metadata only, so every backend serves it. The block tables lose the
# pages in between, the lengths lose their tokens, and a prompt becomes chunks whose rows see the
# same pages. Rotary positions, and where keys and values are written, stay as they are.


@dataclass(frozen=True)
class SinkWindow:
    """A row sees the pages of the first `sink` tokens and those of the last `size`, its own
    included. All rows of a round's window see the pages that its first row sees."""

    sink: int
    size: int

    def cut(self, metadata: AttentionMetadata, page_size: int) -> AttentionMetadata:
        """The same rows over shorter block tables, in which each row sees all keys up to its
        own."""
        num_sink = -(-self.sink // page_size)
        # A page is hidden from rows from this position on, and one more every page.
        start = (num_sink + 1) * page_size + self.size - 1
        if max((*metadata.context_kv_lens, metadata.max_kv_len)) <= start:
            return metadata
        num_chunks, tree = len(metadata.context_lens), metadata.tree
        num_rows = metadata.rows.window if tree is None else tree.length
        tables, ends = metadata.block_tables, metadata.kv_lens[num_chunks:]
        firsts = ends - (metadata.rows.counts if tree is None else num_rows)
        parts = list(_parts(metadata, start, page_size))
        if parts:
            sent = to_device(parts, tables.device).T
            tables = torch.cat((tables.index_select(0, sent[0]), tables[num_chunks:]))
            firsts, ends = torch.cat((sent[1], firsts)), torch.cat((sent[2], ends))
        hidden = (firsts - (start - page_size)).clamp_min_(0) // page_size
        num_pages = num_sink + 1 + -(-(self.size + num_rows) // page_size)
        pages = torch.arange(min(num_pages, tables.shape[1]), device=tables.device)
        pages = pages + (pages >= num_sink) * hidden.unsqueeze(1)
        return replace(
            metadata,
            context_lens=tuple(end - first for _, first, end in parts),
            context_kv_lens=tuple(
                end - max(0, first - (start - page_size)) // page_size * page_size
                for _, first, end in parts
            ),
            block_tables=tables.gather(1, pages.clamp_max_(tables.shape[1] - 1)),
            kv_lens=(ends - hidden * page_size).to(torch.int32),
            max_kv_len=min(metadata.max_kv_len, num_pages * page_size),
        )


def _parts(
    metadata: AttentionMetadata, start: int, page_size: int
) -> Iterator[tuple[int, int, int]]:
    """Chunks whose rows see the same pages: the number of the chunk that each is a part of, its
    first position and its end."""
    for chunk, (length, end) in enumerate(
        zip(metadata.context_lens, metadata.context_kv_lens, strict=True)
    ):
        first = end - length
        while first < end:
            next_page = start + max(0, first - start + page_size) // page_size * page_size
            yield chunk, first, min(end, next_page)
            first = next_page


@dataclass(frozen=True)
class PagedGroup:
    """A layer group. Groups whose pages have the same numbers share `rows`."""

    backend: AttentionBackend
    rows: RowBuilder


@dataclass(frozen=True)
class PlannedRows:
    """The rows of a forward: ids and positions `[T]`, the planned attention of each group, and the
    rows in layers with a recurrent state, if there are any."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: tuple[GroupAttention, ...]
    recurrent: RecurrentRows | None = None


class AttentionGroups:
    """All groups of one model. Ids and positions of rows are the same in each. memory: of layers
    with a recurrent state, which have no pages; None: there are none. sees: the part of a text that
    rows attend to; None: as each backend's geometry says."""

    def __init__(
        self,
        groups: Sequence[PagedGroup],
        memory: RecurrentMemory | None = None,
        sees: SinkWindow | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.memory = memory
        self._sees = sees

    @property
    def rows(self) -> RowBuilder:
        """The rows of the first group."""
        return self.groups[0].rows

    @property
    def supports_graphs(self) -> bool:
        """Whether CUDA graphs can hold generation windows."""
        return all(group.backend.supports_graphs for group in self.groups)

    def plan(
        self, contexts: list[ContextChunk], windows: Windows | None, *, only_writes: bool = False
    ) -> PlannedRows:
        """only_writes: plans no attention, only the writing of keys and values."""
        rows, planned = self.rows, list[GroupAttention]()
        metadata, token_ids = self._metadata(rows, contexts, windows)
        positions = metadata.positions
        for group in self.groups:
            if group.rows is not rows:
                rows = group.rows
                metadata, _ = self._metadata(rows, contexts, windows)
            plan = AttentionPlan(metadata.kv_slots) if only_writes else group.backend.plan(metadata)
            planned.append(GroupAttention(group.backend, plan))
        return PlannedRows(token_ids, positions, tuple(planned), self._recurrent(contexts, windows))

    def _metadata(
        self, rows: RowBuilder, contexts: list[ContextChunk], windows: Windows | None
    ) -> tuple[AttentionMetadata, torch.Tensor]:
        metadata, token_ids = rows.build(contexts, windows)
        if self._sees is not None:
            metadata = self._sees.cut(metadata, rows.page_size)
        return metadata, token_ids

    def _recurrent(
        self, contexts: list[ContextChunk], windows: Windows | None
    ) -> RecurrentRows | None:
        if self.memory is None:
            return None
        parts = []
        if contexts:
            parts.append(self._prompts(contexts, self.memory))
        if windows is not None:
            assert windows.num_padding is None, "a target's windows have no padding"
            tree = None if windows.tree is None else windows.tree.mask.bits
            rows = windows.rows
            parts.append(
                self.memory.begin(windows.slots, windows.first, rows, are_kept=False, tree=tree)
            )
        return RecurrentRows(self.memory, parts)

    def _prompts(self, contexts: list[ContextChunk], memory: RecurrentMemory) -> DeltaRows:
        counts = [len(chunk.tokens) for chunk in contexts]
        number, geometry = len(counts), memory.geometry
        blocks = [geometry.num_blocks(each.start, each.end, each.prompt_len) for each in contexts]
        owners = [request for request in range(number) for _ in range(blocks[request])]
        slots_and_first = [chunk.slot for chunk in contexts], [chunk.start for chunk in contexts]
        numbers = *slots_and_first, [0, *accumulate(counts)], [0, *accumulate(blocks)], owners
        sent = to_device([each for part in numbers for each in part], self.rows.device)
        slots, first, *others = sent.split_with_sizes([len(part) for part in numbers])
        offsets, starts, of_blocks = (each.to(torch.int32) for each in others)
        rows = RoundRows(number, max(counts), sum(counts), offsets)
        own = DeltaBlocks(geometry.block, starts, of_blocks) if owners else None
        return memory.begin(slots, first, rows, are_kept=True, blocks=own)

    def keep_paths(self, windows: Windows, rows: torch.Tensor, lens: torch.Tensor) -> None:
        """Moves the KV of the accepted rows of trees to the front of their windows, and these rows'
        inputs of layers with a state. lens `[B]`: how many of rows `[B, D+1]` are accepted."""
        if self.memory is not None:
            self.memory.keep_paths(windows.slots, windows.first, rows, lens)
        num_pages = -(-windows.max_kv_len // self.rows.page_size)
        for group in self.groups:
            tables = group.rows.table.rows(windows.slots, num_pages)
            move_kv(group.backend.pool.planes, tables, windows.first, rows, lens)
