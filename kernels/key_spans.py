"""Layers that see a part of the keys only, sliding windows (Mistral) and chunks of positions
(Llama 4): the first key that each row sees."""

from dataclasses import dataclass, replace

import torch

from tllm_spec.kernels.tree_mask import TreeMask


@dataclass(frozen=True)
class KeySpan:
    """The keys that a query sees up to its own: if it `slides` the last `size`, otherwise those
    from the start of its own chunk of `size` positions on."""

    size: int
    slides: bool

    @property
    def code(self) -> int:
        """What kernels are compiled for: `size` of chunks, -`size` of sliding windows."""
        return -self.size if self.slides else self.size

    def first_key(self, position: int) -> int:
        """The lowest position that a query at this one sees."""
        if self.slides:
            return max(position - self.size + 1, 0)
        return position // self.size * self.size


@dataclass(frozen=True)
class KeySpans:
    """Rows of windows, which see the keys in `span` of their own position."""

    span: KeySpan
    positions: torch.Tensor
    """`[T]` int64, on the device."""

    def first_keys(self) -> torch.Tensor:
        """The lowest position that each row sees, `[T]`."""
        size, rows = self.span.size, self.positions
        return (rows - (size - 1)).clamp_min(0) if self.span.slides else rows // size * size

    def cut(self, tree: TreeMask) -> TreeMask:
        """The same tree without the keys of its region that its rows do not see. A row's keys of
        the region are a path that ends at the row's own position, so the last ones are kept."""
        rows = self.positions.view(tree.bits.shape)
        index = torch.arange(tree.length, device=rows.device)
        sees = (tree.bits.unsqueeze(-1) >> index) & 1
        # Keys of the path from each key to its end.
        num_left = sees.flip(-1).cumsum(-1).flip(-1)
        num_seen = rows - self.first_keys().view(rows.shape) + 1
        sees *= num_left <= num_seen.unsqueeze(-1)
        return replace(tree, bits=(sees << index).sum(-1))
