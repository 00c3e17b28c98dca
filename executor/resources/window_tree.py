"""The draft trees in the windows of slots: which row continues which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.draft_shape import DraftShape, DraftShapes
from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.row_copies import gather_rows


@dataclass(frozen=True)
class WindowTree:
    """The trees of B windows of W rows. Row 0 is the root, a parent comes before its children.
    `depth` (D): drafts that may be accepted, at most."""

    depth: int
    parents: torch.Tensor
    """`[B, W]` int64; -1 for the root and for rows that may not be accepted."""
    depths: torch.Tensor
    """`[B, W]` int64, contiguous."""
    bits: torch.Tensor
    """`[B, W]` int64, contiguous: which rows each row sees, its own included."""

    def split(self, sizes: Sequence[int]) -> list[WindowTree]:
        parts = (tensor.split_with_sizes(list(sizes)) for tensor in self._tensors)
        return [WindowTree(self.depth, *part) for part in zip(*parts, strict=True)]

    def of(self, requests: torch.Tensor | None) -> WindowTree:
        """Of some of the B requests; None: of all."""
        if requests is None:
            return self
        return WindowTree(self.depth, *(own.index_select(0, requests) for own in self._tensors))

    @property
    def paths(self) -> torch.Tensor:
        """`[B, W, W]` bool: whether each row is, or comes after, the draft of each column."""
        columns = torch.arange(self.bits.shape[1], device=self.bits.device)
        return ((self.bits.unsqueeze(2) >> columns) & 1).bool() & (columns > 0)

    @property
    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.parents, self.depths, self.bits


class SlotTrees:
    """The trees of S slots, `[S, W]` each as in `WindowTree`."""

    def __init__(self, num_slots: int, shapes: DraftShapes, device: torch.device) -> None:
        rows = torch.arange(shapes.longest.window, device=device)
        # Of a slot whose window holds no tree, every row follows the root and sees itself.
        self._no_tree = (
            torch.full_like(rows, -1),
            (rows > 0).to(torch.int64),
            (torch.ones_like(rows) << rows) | 1,
        )
        self._tables = [row.repeat(num_slots, 1) for row in self._no_tree]

    def take(
        self, slot_ids: torch.Tensor, num_drafts: torch.Tensor, shape: DraftShape
    ) -> WindowTree:
        """The first rows of the slots' trees, of which drafts up to a depth of num_drafts `[B]` may
        be accepted."""
        width = shape.window
        parents, depths, bits = (gather_rows(own[:, :width], slot_ids) for own in self._tables)
        parents = parents.masked_fill(depths > num_drafts.unsqueeze(1), -1)
        return WindowTree(shape.depth, parents, depths, bits)

    def write(self, slot_ids: torch.Tensor, tree: DraftTree) -> None:
        """Rows after the tree's are not used."""
        width = tree.parents.shape[1]
        for table, empty, own in zip(
            self._tables, self._no_tree, (tree.parents, tree.depths, tree.bits), strict=True
        ):
            rest = empty[width:].expand(len(slot_ids), -1)
            table[slot_ids] = torch.cat((own, rest), dim=1)
