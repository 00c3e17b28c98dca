"""Turns context chunks and windows into a forward's inputs: token ids, positions, and where
attention reads and writes.

It knows slots, lengths and block tables, no model and no requests. Models may share one block
table, each with a pool of its own: a page number then means the same tokens in every pool."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.attention.interface import AttentionMetadata
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.resources.pages import BlockTable
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows, WindowRows, window_rows

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
    rotary position first + depths[b, r]; its KV goes to index first + offset + r. Verification of a
    whole tree has offset 0; draft step s of K beams has offset s * K, so that beams attend to their
    own ancestors in the earlier steps."""

    depths: torch.Tensor
    """`[B, R]` int64, contiguous, on the device."""
    mask: TreeMask
    """The mask has offset + R keys."""
    offset: int

    def __post_init__(self) -> None:
        assert self.mask.offset == self.offset and self.mask.bits.shape == self.depths.shape


@dataclass(frozen=True)
class Windows:
    """B generation windows: slots `[B]`, first positions `[B]`, token_ids `[B, W]`, all on the
    device. `max_kv_len` is the host's upper bound of first position + W. The first `num_padding`
    `[B]` rows of each window are padding, perhaps before position 0; their KV goes to the dummy
    page. With `tree` the rows are nodes of a tree, never padding, and `max_kv_len` is the bound of
    first + offset + W.

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


class RowBuilder:
    """Makes the rows of one forward over the pages of `table`."""

    def __init__(
        self, table: BlockTable, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        """num_pages: of the pool, with `page_size` tokens each."""
        self.table = table
        self.page_size = page_size
        self.device = device
        # Positions and KV slots are runs of consecutive numbers. Copying a run from here is as fast
        # as making a few numbers.
        self._numbers = array("q")
        self._numbers.frombytes(
            torch.arange(max(num_pages * page_size, self.max_len)).numpy().tobytes()
        )

    @property
    def max_len(self) -> int:
        """Most tokens that a row of the block table has pages for."""
        return self.table.device_rows.shape[1] * self.page_size

    def build(
        self, contexts: list[ContextChunk], windows: Windows | None
    ) -> tuple[AttentionMetadata, torch.Tensor]:
        """Metadata and token ids `[T]`: the chunks one after another, then the windows."""
        if contexts:
            return self._mixed_metadata(contexts, windows)
        assert windows is not None
        return self._window_metadata(windows)

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
                *((None, 0) if tree is None else (tree.depths, tree.offset)),
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
            is_own, self._kv_slots(tables, positions), positions % self.page_size
        )
        # Attention needs at least one key; that of an empty slot is in the dummy page.
        kv_lens = (windows.first + width).clamp_min_(1).to(torch.int32)
        return WindowRows(positions.flatten(), kv_slots.flatten(), kv_lens, tables)

    def pages(self, chunks: Sequence[ContextChunk]) -> "array[int]":
        """The pages of each chunk's sequence up to the chunk's end, int32, one chunk after
        another."""
        pages = array("i")
        for chunk in chunks:
            pages += self.table.pages(chunk.slot)[: -(-chunk.end // self.page_size)]
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
            for page in self.table.pages(chunk.slot)[first_page : -(-chunk.end // size)]:
                own += numbers[page * size : (page + 1) * size]
            first = chunk.start - first_page * size
            kv_slots += own[first : first + len(chunk.tokens)]
        assert len(token_ids) == len(positions) == len(kv_slots), (
            "a chunk is longer than its slot's pages"
        )
        padding = array("q", bytes(8 * (length - len(token_ids))))
        return token_ids + padding + positions + padding + kv_slots + padding

    def _mixed_metadata(
        self, contexts: list[ContextChunk], windows: Windows | None
    ) -> tuple[AttentionMetadata, torch.Tensor]:
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

    def _kv_slots(self, block_tables: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """KV slots of positions `[N, W]` in rows with pages `[N, P]`."""
        pages = block_tables.gather(1, positions // self.page_size)
        return pages.to(torch.int64) * self.page_size + positions % self.page_size


def _part_of(whole: WindowRows, part: RoundRows, first: torch.Tensor) -> WindowRows:
    """The rows that run, of whole windows that start at positions first `[B]`."""
    shape = part.num_requests, part.window
    positions, kv_slots = (
        part.flat(each.view(shape)) for each in (whole.positions, whole.kv_slots)
    )
    kv_lens = (first + part.counts).to(torch.int32)
    return WindowRows(positions, kv_slots, kv_lens, whole.block_tables)
