"""Attention within chunks of positions (Llama 4): the first key that each row sees."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.tree_mask import TreeMask


@dataclass(frozen=True)
class KeyChunks:
    """Rows of B windows of W tokens see no key before the chunk of their own position."""

    size: int
    """Positions of a chunk."""
    positions: torch.Tensor
    """`[B * W]` int64, on the device."""

    def first_keys(self, window: int) -> torch.Tensor:
        """The lowest position that each row sees, `[B, W]`."""
        return (self.positions // self.size * self.size).view(-1, window)

    def cut(self, tree: TreeMask) -> TreeMask:
        """The same tree without the keys of its region that are in earlier chunks. A row's keys of
        the region are a path that ends at the row's own position, so the last ones are kept."""
        rows = self.positions.view(tree.bits.shape)
        index = torch.arange(tree.length, device=rows.device)
        sees = (tree.bits.unsqueeze(2) >> index) & 1
        # Keys of the path from each key to its end.
        num_left = sees.flip(2).cumsum(2).flip(2)
        sees *= num_left <= (rows % self.size + 1).unsqueeze(2)
        return TreeMask((sees << index).sum(2), tree.length)
