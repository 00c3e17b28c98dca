"""Copies of rows: a gather from a table or from a slice of one, a copy between buffers of different
widths, and writes into ring buffers.

Each is one Triton kernel if Triton is available, otherwise the plain-torch reference, which is the
definition. For the few rows of a generation round torch's kernels read one row after another, and
they do not use programmatic dependent launch (programmatic_launch.py)."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("row_copies_triton.gather_rows_triton")
def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`table[rows]`, contiguous. table: `[N, ...]`, contiguous rows, any stride between them; rows:
    `[R]` int64, contiguous, in range, which is not checked on a device."""
    return table.index_select(0, rows)


@with_kernel("row_copies_triton.gather_slice_rows_triton")
def gather_slice_rows(table: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
    """As `gather_rows`, where `table` is the slice of a larger table from its row `first` on; zeros
    for rows outside the slice. table: `[N, W]`, contiguous, N >= 1."""
    inside = (rows - first).clamp_(0, len(table) - 1)
    is_outside = (inside != rows - first).unsqueeze(1)
    return table.index_select(0, inside).masked_fill_(is_outside, 0)


@with_kernel("row_copies_triton.copy_rows_triton")
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


@with_kernel("row_copies_triton.store_in_rings_triton", argument=1)
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
