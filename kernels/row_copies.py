"""Rows from one place to another: picked out of a table by number, beside others in a wider buffer,
or into rings.

Each is one Triton kernel where there is any and its plain-torch reference, which is the definition,
elsewhere. For the few rows of a generation round torch's own kernels read one row behind the other,
and none may be launched early (programmatic_launch.py). Bits are copied, nothing is computed; what
rows mean is not known here."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.triton_support import has_kernels


def gather_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`table[rows]`, contiguous. table: `[N, ...]`, its rows contiguous, any stride between them;
    rows: `[R]` int64, contiguous, all of them the table's, which is not checked on a device."""
    if not has_kernels(table.device):
        return table.index_select(0, rows)
    from tllm_spec.kernels.row_copies_triton import gather_rows_triton

    return gather_rows_triton(table, rows)


def copy_rows(source: torch.Tensor, destination: torch.Tensor) -> None:
    """Both `[R, W]` of one dtype, their rows contiguous, any stride between them."""
    if not has_kernels(source.device):
        destination.copy_(source)
        return
    from tllm_spec.kernels.row_copies_triton import copy_rows_triton

    copy_rows_triton(source, destination)


@dataclass(frozen=True)
class Rings:
    """Of tokens `[S * length]` int64 and of states `[S * length, W]`, if there are any: what
    belongs to position p of slot s stands at `s * length + p % length`."""

    length: int
    tokens: torch.Tensor
    states: torch.Tensor | None

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Of positions `[B]` of slots `[B]`, or of several a slot, `[B, n]` of `[B, 1]`."""
        return (positions % self.length).add_(slots, alpha=self.length)


def store_in_rings(
    rings: Rings,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    states: torch.Tensor | None,
) -> None:
    """One position of each slot. Where two rows have the same place, either may stand there.

    Args:
        slots, positions: `[B]` int64, contiguous, positions from 0 on.
        tokens: `[B]` int64, any stride.
        states: `[B, W]` of the rings' dtype, any stride between rows; None exactly where the rings
        have none.
    """
    assert (states is None) == (rings.states is None)
    if not has_kernels(rings.tokens.device):
        store_in_rings_reference(rings, slots, positions, tokens, states)
        return
    from tllm_spec.kernels.row_copies_triton import store_in_rings_triton

    ring = (rings.length, rings.tokens, rings.states)
    store_in_rings_triton(ring, slots, positions, tokens, states)


def store_in_rings_reference(
    rings: Rings,
    slots: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    states: torch.Tensor | None,
) -> None:
    """Arguments of `store_in_rings`."""
    places = rings.places(slots, positions)
    rings.tokens.index_copy_(0, places, tokens)
    if rings.states is not None and states is not None:
        rings.states.index_copy_(0, places, states)
