"""Which rows of a round's forward belong to which request, and their metadata: positions, KV slots,
and the pages that attention reads."""

from dataclasses import dataclass
from functools import cached_property

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided

# Which rows of a round's forward belong to which request.


@dataclass(frozen=True)
class RoundRows:
    """T rows of B requests, one request after another. Each request has the first 1 to W rows of
    its window. The host knows B, W and T only; which rows are whose is read on the device."""

    num_requests: int
    """B."""
    window: int
    """W."""
    num_rows: int
    """T."""
    offsets: torch.Tensor | None = None
    """[B + 1] int32, device: request b has the rows offsets[b] to offsets[b + 1]. None: all have W
    rows, a rectangle."""

    @classmethod
    def rectangle(cls, num_requests: int, window: int) -> "RoundRows":
        return cls(num_requests, window, num_requests * window)

    @property
    def counts(self) -> torch.Tensor | int:
        """Rows of each request, `[B]` int32; of a rectangle W."""
        return self.window if self.offsets is None else self.offsets.diff()

    def expand(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the requests `[B, ...]`, repeated for each of their rows: `[T, ...]`."""
        if self.offsets is None:
            return values.repeat_interleave(self.window, dim=0)
        return values.index_select(0, self._owners)

    def flat(self, values: torch.Tensor) -> torch.Tensor:
        """The rows' part `[T, ...]` of values of whole windows `[B, W, ...]`."""
        values = values.flatten(0, 1)
        return values if self.offsets is None else values.index_select(0, self._places)

    def padded(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the rows `[T, ...]` as whole windows `[B, W, ...]`. A request's last row stands
        for the rows that it does not have."""
        if self.offsets is not None:
            values = values.index_select(0, self.padded_rows.flatten())
        return values.view(self.num_requests, self.window, *values.shape[1:])

    def column(self, values: torch.Tensor, index: int) -> torch.Tensor:
        """Values of the rows `[T, ...]` at one index of each window, `[B, ...]`, as in `padded`."""
        if self.offsets is None:
            return values[index :: self.window]
        return values.index_select(0, self.padded_rows[:, index])

    @cached_property
    def padded_rows(self) -> torch.Tensor:
        """The row of each place of whole windows, `[B, W]`."""
        assert self.offsets is not None
        places = torch.arange(self.window, device=self.offsets.device)
        return torch.minimum(self.offsets[:-1, None] + places, self.offsets[1:, None] - 1)

    @cached_property
    def _owners(self) -> torch.Tensor:
        """The request of each row, `[T]`."""
        assert self.offsets is not None
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=self.offsets.device)
        return torch.searchsorted(self.offsets[1:], rows, right=True)

    @cached_property
    def _places(self) -> torch.Tensor:
        """The place of each row in the flattened whole windows, `[T]`."""
        assert self.offsets is not None
        rows = torch.arange(self.num_rows, device=self.offsets.device)
        unused = torch.arange(self.num_requests, device=rows.device) * self.window
        return rows + self.expand(unused - self.offsets[:-1])


# Row metadata of generation windows: positions, KV slots, and the pages that attention reads. On
# CUDA one Triton kernel instead of eleven launches per forward, elsewhere the plain-torch
# reference.


@dataclass(frozen=True)
class WindowRows:
    """The rows of B windows of W tokens: positions and kv_slots `[B * W]` int64, kv_lens `[B]`
    int32 including the window, block_tables `[B, P]` int32. With a tree the positions are not those
    of the slots."""

    positions: torch.Tensor
    kv_slots: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: torch.Tensor


@with_kernel("window_rows_triton")
def window_rows(
    table: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    width: int,
    num_pages: int,
    page_size: int,
    depths: torch.Tensor | None = None,
    offset: int = 0,
) -> WindowRows:
    """table `[S, P_max]` int32; slots and first `[B]` int64: the windows' slots and first
    positions. The first `num_pages` pages of a row must cover its window.

    With `depths` `[B, W]` int64, contiguous, the rows are of a tree that starts at `first`: their
    positions are first + depths, and their KV comes after the tree's first `offset` keys."""
    keys = first.unsqueeze(1) + torch.arange(offset, offset + width, device=first.device)
    positions = keys if depths is None else first.unsqueeze(1) + depths
    block_tables = table[:, :num_pages].index_select(0, slots)
    pages = block_tables.gather(1, keys // page_size).to(torch.int64)
    kv_slots = pages * page_size + keys % page_size
    kv_lens = (first + (offset + width)).to(torch.int32)
    return WindowRows(positions.flatten(), kv_slots.flatten(), kv_lens, block_tables)


_BLOCK = 1024


def window_rows_triton(
    table: torch.Tensor,
    slots: torch.Tensor,
    first: torch.Tensor,
    width: int,
    num_pages: int,
    page_size: int,
    depths: torch.Tensor | None = None,
    offset: int = 0,
) -> WindowRows:
    """See `window_rows`."""
    assert depths is None or depths.is_contiguous()
    batch, device = len(slots), table.device
    positions = torch.empty(batch * width, dtype=torch.int64, device=device)
    kv_slots = torch.empty_like(positions)
    kv_lens = torch.empty(batch, dtype=torch.int32, device=device)
    block_tables = torch.empty((batch, num_pages), dtype=torch.int32, device=device)
    # Not from num_pages, because each block size compiles another kernel.
    block = min(_BLOCK, triton.next_power_of_2(table.shape[1]))
    _rows[(batch, triton.cdiv(num_pages, block))](
        *strided(table),
        slots,
        first,
        positions,
        kv_slots,
        kv_lens,
        block_tables,
        num_pages,
        depths,
        offset,
        depths is not None,
        page_size,
        width,
        triton.next_power_of_2(width),
        block,
        **programmatic_launch(device),
    )
    return WindowRows(positions, kv_slots, kv_lens, block_tables)


@triton.jit(
    do_not_specialize=["num_pages", "offset"],
    do_not_specialize_on_alignment=["slots", "first", "depths"],
)
def _rows(
    table: tl.tensor, table_stride: tl.tensor, slots: tl.tensor, first: tl.tensor,
    positions: tl.tensor, kv_slots: tl.tensor, kv_lens: tl.tensor, block_tables: tl.tensor,
    num_pages: tl.tensor, depths: tl.tensor, offset: tl.tensor, in_tree: tl.constexpr,
    page_size: tl.constexpr, width: tl.constexpr, padded_width: tl.constexpr, block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = table + tl.load(slots + request) * table_stride
    index = part * block + tl.arange(0, block)
    exists = index < num_pages
    tl.store(
        block_tables + request * num_pages + index,
        tl.load(row + index, mask=exists, other=0),
        mask=exists,
    )
    if part == 0:
        column = tl.arange(0, padded_width)
        is_row = column < width
        start = tl.load(first + request)
        key = start + column
        position = key
        if in_tree:
            depth = tl.load(depths + request * width + column, mask=is_row, other=0)
            position = start + depth
            start += offset
            key = start + column
        page = tl.load(row + key // page_size, mask=is_row, other=0).to(tl.int64)
        tl.store(positions + request * width + column, position, mask=is_row)
        tl.store(
            kv_slots + request * width + column, page * page_size + key % page_size, mask=is_row
        )
        tl.store(kv_lens + request, (start + width).to(tl.int32))
