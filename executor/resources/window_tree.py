"""The draft trees in the windows of slots: which row continues which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.kernels.slots.accept import TreeTables
from tllm_spec.kernels.slots.row_copies import gather_rows


@dataclass(frozen=True)
class WindowTree:
    """The trees of B windows of W rows. Row 0 is the root, a parent comes before its children.
    `depth` (D): drafts that may be accepted, at most."""

    depth: int
    depths: torch.Tensor
    """`[B, W]` int64, contiguous."""
    bits: torch.Tensor
    """`[B, W]` int64, contiguous: which rows each row sees, its own included."""

    def split(self, sizes: Sequence[int]) -> list[WindowTree]:
        depths, bits = (each.split_with_sizes(list(sizes)) for each in (self.depths, self.bits))
        return [WindowTree(self.depth, *part) for part in zip(depths, bits, strict=True)]

    def of(self, requests: torch.Tensor | None) -> WindowTree:
        """The trees of some of the B requests; None: of all."""
        if requests is None:
            return self
        depths, bits = (each.index_select(0, requests) for each in (self.depths, self.bits))
        return WindowTree(self.depth, depths, bits)

    @property
    def paths(self) -> torch.Tensor:
        """`[B, W, W]` bool: whether each row is, or comes after, the draft of each column."""
        columns = torch.arange(self.bits.shape[1], device=self.bits.device)
        return ((self.bits.unsqueeze(2) >> columns) & 1).bool() & (columns > 0)


class SlotTrees:
    """The trees of S slots in windows of W rows. `tables` has `[S, W]` int64: parents (-1 for the
    root), depths and bits."""

    def __init__(self, num_slots: int, width: int, device: torch.device) -> None:
        rows = torch.arange(width, device=device)
        self._chain = rows - 1, rows, (torch.full_like(rows, 2) << rows) - 1
        # A row that was never written sees the root and itself.
        self.tables = TreeTables(
            torch.full_like(rows, -1).repeat(num_slots, 1),
            (rows > 0).to(torch.int64).repeat(num_slots, 1),
            ((torch.ones_like(rows) << rows) | 1).repeat(num_slots, 1),
        )

    @property
    def parents(self) -> torch.Tensor:
        return self.tables.parents

    def take(self, slot_ids: torch.Tensor, shape: DraftShape) -> WindowTree:
        """The first rows of the trees of slots `[B]`."""
        depths = gather_rows(self.tables.depths[:, : shape.window], slot_ids)
        bits = gather_rows(self.tables.bits[:, : shape.window], slot_ids)
        return WindowTree(shape.depth, depths, bits)

    def write_chains(self, slot_ids: torch.Tensor, length: int) -> None:
        """A chain of that many drafts in each of the slots `[B]`."""
        tables = self.tables.parents, self.tables.depths, self.tables.bits
        for table, chain in zip(tables, self._chain, strict=True):
            table[slot_ids, : length + 1] = chain[: length + 1]
