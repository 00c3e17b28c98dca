"""Turns context chunks and windows into a forward's inputs: token ids, positions, where attention
reads and writes, and the planned attention of each layer group.

It knows slots, lengths and block tables, no model and no requests. Models may share one block
table, each with a pool of its own: a page number then means the same tokens in every pool."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from tllm_spec.attention.interface import (
    AttentionBackend,
    AttentionMetadata,
    AttentionPlan,
    FirstChoice,
    GroupAttention,
    HeadsBackend,
    slots_of,
)
from tllm_spec.attention.recurrent import RecurrentMemory, RecurrentRows
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.resources.interface import BlockTable
from tllm_spec.kernels.attention.move_kv import move_kv
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows, WindowRows, window_rows
from tllm_spec.kernels.states.gated_delta import DeltaBlocks, DeltaRows

# In numbers. Triton compiles a kernel again for addresses that are not multiples of 16 bytes.
ROW_ALIGNMENT = 16


@dataclass(frozen=True)
class ContextChunk:
    """Tokens of one sequence, to be prefilled from position `start` on. prompt_len: tokens of its
    prompt; only layers with a recurrent state read it."""

    slot: int
    start: int
    tokens: list[int]
    prompt_len: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class TreeRows:
    """The windows' rows are R nodes of a tree whose KV region starts at index `first`. Row r has
    rotary position first + depths[b, r]; its KV goes to index first + mask.offset + r. Verification
    of a whole tree has offset 0; draft step s of K beams has offset s * K, so that beams attend to
    their own ancestors in the earlier steps."""

    depths: torch.Tensor
    """`[B, R]` int64, contiguous, on the device."""
    mask: TreeMask
    in_windows: TreeMask | None = None
    """The mask in layers with a sliding window, if it is another one there."""


@dataclass(frozen=True)
class Windows:
    """B generation windows: slots `[B]`, first positions `[B]`, token_ids `[B, W]`, all on the
    device. `max_kv_len` is the host's upper bound of first position + W. The first `num_padding`
    `[B]` rows of each window are padding, perhaps before position 0; their KV goes to the dummy
    page. With `tree` the rows are nodes of a tree, never padding, and `max_kv_len` is the bound of
    first + mask.offset + W.

    `part`: the rows of the windows that run, the first ones of each, without padding; None: all of
    them."""

    slots: torch.Tensor
    first: torch.Tensor
    token_ids: torch.Tensor
    max_kv_len: int
    num_padding: torch.Tensor | None = None
    tree: TreeRows | None = None
    part: RoundRows | None = None

    @property
    def rows(self) -> RoundRows:
        """The rows that run."""
        return self.part or RoundRows.rectangle(*self.token_ids.shape)


def slot_rows(
    chunks: Sequence[ContextChunk], windows: Windows | None
) -> tuple[list[tuple[int, int]], tuple[torch.Tensor, RoundRows] | None]:
    """Whose rows a forward has, as `AdapterSlots.write_rows` takes it."""
    own = None if windows is None else (windows.slots, windows.rows)
    return [(chunk.slot, len(chunk.tokens)) for chunk in chunks], own


class RowBuilder:
    """Makes the rows of one forward over the pages of `table`."""

    def __init__(
        self, table: BlockTable, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        """num_pages: of the pool, with `page_size` tokens each."""
        self.table = table
        self.page_size = page_size
        self.device = device
        # Most tokens that a row of the block table has pages for.
        self.max_len = table.device_rows.shape[1] * page_size
        # Positions and KV slots are runs of consecutive numbers. Copying a run from here is as fast
        # as making a few numbers.
        self._numbers = array("q")
        self._numbers.frombytes(
            torch.arange(max(num_pages * page_size, self.max_len)).numpy().tobytes()
        )

    def build(
        self, contexts: list[ContextChunk], windows: Windows | None
    ) -> tuple[AttentionMetadata, torch.Tensor]:
        """Metadata and token ids `[T]`: the chunks one after another, then the windows."""
        if not contexts:
            assert windows is not None
            return self._window_metadata(windows)
        lens = tuple(len(chunk.tokens) for chunk in contexts)
        ends = tuple(chunk.end for chunk in contexts)
        num_pages = -(-max((*ends, windows.max_kv_len if windows else 0)) // self.page_size)
        length = -(-sum(lens) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        numbers = self.context_rows(contexts, length)
        numbers.frombytes(array("i", [*(chunk.slot for chunk in contexts), *ends]).tobytes())
        sent = to_device(numbers, self.device)  # one copy
        rows, chunks = sent.split_with_sizes((3 * length, len(contexts)))
        token_ids, positions, kv_slots = rows.view(3, length)[:, : sum(lens)].unbind(0)
        slots, kv_lens = chunks.view(torch.int32).chunk(2)
        tables = self.table.rows(slots, num_pages)
        none = RoundRows.rectangle(0, 1)
        metadata = AttentionMetadata(lens, ends, none, tables, kv_lens, positions, kv_slots, 0)
        if windows is None:
            return metadata, token_ids
        own, window_ids = self._window_metadata(windows)
        tail = self.table.rows(windows.slots, num_pages)
        metadata.rows, metadata.max_kv_len = own.rows, own.max_kv_len
        metadata.num_padding, metadata.tree = own.num_padding, own.tree
        metadata.block_tables = torch.cat((tables, tail))
        metadata.kv_lens = torch.cat((kv_lens, own.kv_lens))
        metadata.positions = torch.cat((positions, own.positions))
        metadata.kv_slots = torch.cat((kv_slots, own.kv_slots))
        return metadata, torch.cat((token_ids, window_ids))

    def _window_metadata(self, windows: Windows) -> tuple[AttentionMetadata, torch.Tensor]:
        width, part = windows.token_ids.shape[1], windows.rows
        num_pages = -(-windows.max_kv_len // self.page_size)
        tree = windows.tree
        if windows.num_padding is not None:
            assert tree is None
            rows = self._padded_rows(windows, windows.num_padding, num_pages)
        else:
            rows = window_rows(
                self.table.device_rows,
                windows.slots,
                windows.first,
                width,
                num_pages,
                self.page_size,
                *((None, 0) if tree is None else (tree.depths, tree.mask.offset)),
            )
        if part.offsets is not None:
            assert windows.num_padding is None
            rows = _part_of(rows, part, windows.first)
        metadata = AttentionMetadata(
            context_lens=(),
            context_kv_lens=(),
            rows=part,
            block_tables=rows.block_tables,
            kv_lens=rows.kv_lens,
            positions=rows.positions,
            kv_slots=rows.kv_slots,
            max_kv_len=windows.max_kv_len,
            num_padding=windows.num_padding,
            tree=None if tree is None else tree.mask.of(part),
        )
        return metadata, part.flat(windows.token_ids)

    def _padded_rows(
        self, windows: Windows, num_padding: torch.Tensor, num_pages: int
    ) -> WindowRows:
        tables = self.table.rows(windows.slots, num_pages)
        width = windows.token_ids.shape[1]
        row = torch.arange(width, device=tables.device)
        positions = (windows.first.unsqueeze(1) + row).clamp_min_(0)
        is_own = row >= num_padding.unsqueeze(1)
        kv_slots = torch.where(
            is_own, slots_of(tables, positions, self.page_size), positions % self.page_size
        )
        # Attention needs at least one key; that of an empty slot is in the dummy page.
        kv_lens = (windows.first + width).clamp_min_(1).to(torch.int32)
        return WindowRows(positions.flatten(), kv_slots.flatten(), kv_lens, tables)

    def pages(self, chunks: Sequence[ContextChunk]) -> "array[int]":
        """The pages of each chunk's sequence up to the chunk's end, int32, one chunk after
        another."""
        pages = array("i")
        for chunk in chunks:
            pages += self.table.host_rows[chunk.slot][: -(-chunk.end // self.page_size)]
        return pages

    def context_rows(self, chunks: Sequence[ContextChunk], length: int) -> "array[int]":
        """Token ids, positions and KV slots of the chunks' T tokens, `[3, length]`; after the first
        T of each comes padding.

        The host copies runs of numbers that it has. The device would need a dozen kernels in a row
        before the forward could begin."""
        token_ids, positions, kv_slots = array("q"), array("q"), array("q")
        numbers, size = self._numbers, self.page_size
        for chunk in chunks:
            token_ids += array("q", chunk.tokens)
            positions += numbers[chunk.start : chunk.end]
            first_page, own = chunk.start // size, array("q")
            for page in self.table.host_rows[chunk.slot][first_page : -(-chunk.end // size)]:
                own += numbers[page * size : (page + 1) * size]
            first = chunk.start - first_page * size
            kv_slots += own[first : first + len(chunk.tokens)]
        assert len(token_ids) == len(positions) == len(kv_slots), (
            "a chunk is longer than its slot's pages"
        )
        padding = array("q", bytes(8 * (length - len(token_ids))))
        return token_ids + padding + positions + padding + kv_slots + padding


def _part_of(whole: WindowRows, part: RoundRows, first: torch.Tensor) -> WindowRows:
    """The rows that run, of whole windows that start at positions first `[B]`."""
    shape = part.num_requests, part.window
    positions, kv_slots = (
        part.flat(each.view(shape)) for each in (whole.positions, whole.kv_slots)
    )
    kv_lens = (first + part.counts).to(torch.int32)
    return WindowRows(positions, kv_slots, kv_lens, whole.block_tables)


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
        self.rows = groups[0].rows  # those of the first group
        self.memory = memory
        self._sees = sees

    @property
    def supports_graphs(self) -> bool:
        """Whether CUDA graphs can hold generation windows."""
        return all(group.backend.supports_graphs for group in self.groups)

    def plan(
        self,
        contexts: list[ContextChunk],
        windows: Windows | None,
        *,
        only_writes: bool = False,
        first_choice: FirstChoice | None = None,
    ) -> PlannedRows:
        """only_writes: plans no attention, only the writing of keys and values. first_choice: as in
        the metadata."""
        rows, planned = None, list[GroupAttention]()
        mask = None if windows is None or windows.tree is None else windows.tree.in_windows
        for group in self.groups:
            if group.rows is not rows:
                rows = group.rows
                metadata, token_ids = rows.build(contexts, windows)
                if self._sees is not None:
                    metadata = self._sees.cut(metadata, rows.page_size)
                metadata.first_choice = first_choice
            own, backend = metadata, group.backend
            if mask is not None and isinstance(backend, HeadsBackend) and backend.geometry.span:
                own = replace(metadata, tree=mask)
            plan = AttentionPlan(metadata.kv_slots) if only_writes else backend.plan(own)
            planned.append((backend, plan))
        recurrent = None
        if self.memory is not None:
            recurrent = self._recurrent(self.memory, contexts, windows)
        return PlannedRows(token_ids, metadata.positions, tuple(planned), recurrent)

    def _recurrent(
        self, memory: RecurrentMemory, contexts: list[ContextChunk], windows: Windows | None
    ) -> RecurrentRows:
        parts = []
        if contexts:
            parts.append(self._prompts(contexts, memory))
        if windows is not None:
            assert windows.num_padding is None, "a target's windows have no padding"
            tree = None if windows.tree is None else windows.tree.mask.bits
            rows = windows.rows
            parts.append(
                memory.begin(windows.slots, windows.first, rows, are_kept=False, tree=tree)
            )
        return RecurrentRows(memory, parts)

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
