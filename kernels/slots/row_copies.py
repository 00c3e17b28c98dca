"""Copies of rows: a gather from a table or from a slice of one, a copy between buffers of different
widths, and writes into ring buffers, of the device or, with a round's results, of the host."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch, strided

# Copies of rows: a gather from a table or from a slice of one, a copy between buffers of different
# widths, and writes into ring buffers.
#
# Each is one Triton kernel if Triton is available, otherwise the plain-torch reference, which is
# the definition. For the few rows of a generation round torch's kernels read one row after
# another, and they do not use programmatic dependent launch (programmatic_launch.py).


@with_kernel("gather_rows_triton")
def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`table[rows]`, contiguous. table: `[N, ...]`, contiguous rows, any stride between them; rows:
    `[R]` int64, contiguous, in range, which is not checked on a device."""
    return table.index_select(0, rows)


@with_kernel("gather_slice_rows_triton")
def gather_slice_rows(table: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
    """As `gather_rows`, where `table` is the slice of a larger table from its row `first` on; zeros
    for rows outside the slice. table: `[N, W]`, contiguous, N >= 1."""
    inside = (rows - first).clamp_(0, len(table) - 1)
    is_outside = (inside != rows - first).unsqueeze(1)
    return table.index_select(0, inside).masked_fill_(is_outside, 0)


@with_kernel("copy_rows_triton")
def copy_rows(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Both `[R, W]` of one dtype, contiguous rows, any stride between them."""
    destination.copy_(source)


@dataclass(frozen=True)
class Rings:
    """Ring buffers of S slots: tokens `[S * length]` int64, and states `[S * length, W]` or None.
    Position p of slot s is stored at index `s * length + p % length`."""

    length: int
    tokens: torch.Tensor
    states: torch.Tensor | None

    def indices(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Indices of positions `[B]` of slots `[B]`, or of positions `[B, n]` of slots `[B, 1]`."""
        return (positions % self.length).add_(slots, alpha=self.length)


@with_kernel("store_in_rings_triton", argument=1)
def store_in_rings(
    rings: Rings,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    states: torch.Tensor | None,
) -> None:
    """Stores one position of each slot. If two rows have the same index, either may win.

    Args:
        slots, positions: `[B]` int64, contiguous, positions from 0 on.
        tokens: `[B]` int64, any stride.
        states: `[B, W]` of the rings' dtype, any stride between rows; None if and only if the rings
            have no states.
    """
    assert (states is None) == (rings.states is None)
    indices = rings.indices(slots, positions)
    rings.tokens.index_copy_(0, indices, tokens)
    if rings.states is not None and states is not None:
        rings.states.index_copy_(0, indices, states)


# A program copies a part of a row, so that many programs read the rows of a small batch.


_BYTES = 2048  # of a row per program: 16 per thread
_WARPS = 4


def gather_rows_triton(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See `gather_rows`."""
    assert rows.is_contiguous() and table[:1].is_contiguous()
    output = table.new_empty(len(rows), *table.shape[1:])
    _copy(table, output, table[:1].numel(), rows)
    return output


def gather_slice_rows_triton(table: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
    """See `gather_slice_rows`."""
    assert rows.is_contiguous() and table.is_contiguous()
    size = table.shape[1]
    output = table.new_empty(len(rows), size)
    if output.numel():
        block = _block(size, table.element_size())
        gather_slice_rows_kernel[(len(rows), triton.cdiv(size, block))](
            table,
            rows,
            output,
            first,
            table.numel(),
            SIZE=size,
            BLOCK=block,
            **programmatic_launch(table.device, _WARPS),
        )
    return output


def copy_rows_triton(source: torch.Tensor, destination: torch.Tensor) -> None:
    """See `copy_rows`."""
    assert source.shape == destination.shape and source.dtype == destination.dtype
    assert source[:1].is_contiguous() and destination[:1].is_contiguous()
    _copy(source, destination, source.shape[1], None)


def _copy(
    source: torch.Tensor, destination: torch.Tensor, size: int, rows: torch.Tensor | None
) -> None:
    if not destination.numel():
        return
    block = _block(size, source.element_size())
    copy_rows_kernel[(len(destination), triton.cdiv(size, block))](
        *strided(source),
        rows,
        *strided(destination),
        SIZE=size,
        BLOCK=block,
        **programmatic_launch(source.device, _WARPS),
    )


def store_in_rings_triton(
    rings: Rings,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    states: torch.Tensor | None,
) -> None:
    """See `store_in_rings`."""
    assert (states is None) == (rings.states is None)
    assert slots.is_contiguous() and positions.is_contiguous()
    assert rings.tokens.is_contiguous()
    size = 0 if states is None else states.shape[1]
    if states is not None and rings.states is not None:
        assert states[:1].is_contiguous() and rings.states.is_contiguous()
        assert rings.states.shape[1] == size and rings.states.dtype == states.dtype
    if not len(slots):
        return
    block = _block(size, 1 if states is None else states.element_size())
    store_in_rings_kernel[(len(slots), max(1, triton.cdiv(size, block)))](
        slots,
        positions,
        *strided(tokens, states),
        rings.tokens,
        rings.states,
        LENGTH=rings.length,
        SIZE=size,
        BLOCK=block,
        **programmatic_launch(slots.device, _WARPS),
    )


def _block(size: int, element_size: int) -> int:
    return min(int(triton.next_power_of_2(max(size, 1))), _BYTES // element_size)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def copy_rows_kernel(
    source: tl.tensor, source_stride: tl.tensor, rows: tl.tensor, destination: tl.tensor,
    destination_stride: tl.tensor, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, parts of a row)."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if rows is None:
        from_row = row
    else:
        from_row = tl.load(rows + row)
    copy_part(
        source + from_row * source_stride, destination + row * destination_stride, part, SIZE, BLOCK
    )


@triton.jit(do_not_specialize=["first", "num_elements"], do_not_specialize_on_alignment=["rows"])
def gather_slice_rows_kernel(
    table: tl.tensor, rows: tl.tensor, output: tl.tensor, first: tl.tensor, num_elements: tl.tensor,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, parts of a row)."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    element = (tl.load(rows + row) - first) * SIZE + columns
    inside = real & (element >= 0) & (element < num_elements)
    values = tl.load(table + element, mask=inside, other=0)
    tl.store(output + row * SIZE + columns, values, mask=real)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "tokens"])
def store_in_rings_kernel(
    slots: tl.tensor, positions: tl.tensor, tokens: tl.tensor, tokens_stride: tl.tensor,
    states: tl.tensor, states_stride: tl.tensor, ring_tokens: tl.tensor, ring_states: tl.tensor,
    LENGTH: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (slots, parts of a state); the first part has the token."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(slots + row) * LENGTH + tl.load(positions + row) % LENGTH
    if part == 0:
        tl.store(ring_tokens + index, tl.load(tokens + row * tokens_stride))
    if states is not None:
        copy_part(states + row * states_stride, ring_states + index * SIZE, part, SIZE, BLOCK)


@triton.jit
def copy_part(
    source: tl.tensor,
    destination: tl.tensor,
    part: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copies a part of one row."""
    columns = part * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    tl.store(destination + columns, tl.load(source + columns, mask=real), mask=real)


# Writes a round's results into a ring buffer in host memory: on CUDA a Triton kernel that writes
# there directly, elsewhere the plain-torch reference.
#
# A separate copy would cost the host a call per round, and the device a gap between two graphs.


@with_kernel("send_results_triton", argument=1)
def send_results(
    ring: torch.Tensor, number: torch.Tensor, new_lens: torch.Tensor, new_tokens: torch.Tensor
) -> None:
    """Writes entry `number` modulo D, and increments `number`.

    Args:
        ring: `[D, >= 1 + N * (W+1)]` int64, pinned if the rest is on CUDA. An entry is its number,
            then for each request its number of new tokens and all of its W tokens.
        number: `[1]` int64: number of the results written before.
        new_lens: `[N]` int64.
        new_tokens: `[N, W]` int64.
    """
    table = torch.cat((new_lens.unsqueeze(1), new_tokens), dim=1)
    entry = torch.cat((number, table.flatten()))
    assert ring.shape[1] >= len(entry)
    ring[number % len(ring), : len(entry)] = entry
    number += 1


# It moves at most a few kilobytes over PCIe: 2.6 KB for 64 requests with three drafts.


BLOCK = 256


def send_results_triton(
    ring: torch.Tensor, number: torch.Tensor, new_lens: torch.Tensor, new_tokens: torch.Tensor
) -> None:
    """See `send_results`."""
    assert ring.shape[1] > new_lens.numel() + new_tokens.numel() and ring.stride(1) == 1
    width = new_tokens.shape[1]
    _send[(1,)](
        *strided(ring),
        number,
        new_lens.contiguous(),
        new_tokens.contiguous(),
        new_lens.numel() * (1 + width),
        width,
        len(ring),
        BLOCK,
        **programmatic_launch(number.device, 1),
    )


@triton.jit(do_not_specialize=["ring_stride", "num_values", "width"])
def _send(
    ring: tl.tensor, ring_stride: tl.tensor, number: tl.tensor, new_lens: tl.tensor,
    new_tokens: tl.tensor, num_values: tl.tensor, width: tl.tensor, depth: tl.constexpr,
    block: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Has one warp, so all of its threads read the number before one of them increments it."""
    begin(PDL)
    own_number = tl.load(number)
    entry = ring + (own_number % depth) * ring_stride
    tl.store(entry, own_number)
    for start in range(0, num_values, block):
        index = start + tl.arange(0, block)
        request, column = index // (1 + width), index % (1 + width)
        exists = index < num_values
        is_length = column == 0
        length = tl.load(new_lens + request, mask=exists & is_length, other=0)
        token = tl.load(
            new_tokens + request * width + column - 1, mask=exists & ~is_length, other=0
        )
        tl.store(entry + 1 + index, tl.where(is_length, length, token), mask=exists)
    tl.store(number, own_number + 1)
