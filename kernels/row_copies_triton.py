"""The Triton kernels of row_copies.py, which describes inputs and outputs. Importing this file
imports Triton.

A program copies a part of a row, so that many programs read the rows of a small batch."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.row_copies import Rings

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
            **programmatic_launch(table.device),
            num_warps=_WARPS,
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
        source,
        source.stride(0),
        rows,
        destination,
        destination.stride(0),
        SIZE=size,
        BLOCK=block,
        **programmatic_launch(source.device),
        num_warps=_WARPS,
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
        tokens,
        tokens.stride(0),
        states,
        0 if states is None else states.stride(0),
        rings.tokens,
        rings.states,
        LENGTH=rings.length,
        SIZE=size,
        BLOCK=block,
        **programmatic_launch(slots.device),
        num_warps=_WARPS,
    )


def _block(size: int, element_size: int) -> int:
    return min(int(triton.next_power_of_2(max(size, 1))), _BYTES // element_size)


@triton.jit(do_not_specialize_on_alignment=["rows"])  # type: ignore[untyped-decorator]  # triton has no types
def copy_rows_kernel(
    source: tl.tensor,
    source_stride: tl.tensor,
    rows: tl.tensor,
    destination: tl.tensor,
    destination_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, parts of a row)."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if rows is None:
        from_row = row
    else:
        from_row = tl.load(rows + row)
    _copy_part(
        source + from_row * source_stride, destination + row * destination_stride, part, SIZE, BLOCK
    )


@triton.jit(  # type: ignore[untyped-decorator]  # triton has no types
    do_not_specialize=["first", "num_elements"], do_not_specialize_on_alignment=["rows"]
)
def gather_slice_rows_kernel(
    table: tl.tensor,
    rows: tl.tensor,
    output: tl.tensor,
    first: tl.tensor,
    num_elements: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (rows, parts of a row)."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    element = (tl.load(rows + row) - first) * SIZE + columns
    inside = real & (element >= 0) & (element < num_elements)
    values = tl.load(table + element, mask=inside, other=0)
    tl.store(output + row * SIZE + columns, values, mask=real)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "tokens"])  # type: ignore[untyped-decorator]  # triton has no types
def store_in_rings_kernel(
    slots: tl.tensor,
    positions: tl.tensor,
    tokens: tl.tensor,
    tokens_stride: tl.tensor,
    states: tl.tensor,
    states_stride: tl.tensor,
    ring_tokens: tl.tensor,
    ring_states: tl.tensor,
    LENGTH: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (slots, parts of a state); the first part has the token."""
    begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(slots + row) * LENGTH + tl.load(positions + row) % LENGTH
    if part == 0:
        tl.store(ring_tokens + index, tl.load(tokens + row * tokens_stride))
    if states is not None:
        _copy_part(states + row * states_stride, ring_states + index * SIZE, part, SIZE, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _copy_part(
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
