"""Where the tokens stand that the rows of a group sample, and which drafts are before each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tllm_spec.executor.resources.window_tree import WindowTree
from tllm_spec.kernels.round_rows import RoundRows


@dataclass(frozen=True)
class RowPositions:
    """Positions of the tokens that the rows of N requests sample. A first row's token stands at
    kv_lens `[N]` + `ahead`: 0 after contexts, 1 in windows, whose bonus token is at kv_lens. The
    other rows follow one after another, or as the nodes of `tree`."""

    kv_lens: torch.Tensor
    ahead: int
    tree: WindowTree | None = None

    def positions(self, rows: RoundRows, requests: torch.Tensor | None = None) -> torch.Tensor:
        """`[T]`: of the rows of these requests; None: of all."""
        first = self.kv_lens if requests is None else self.kv_lens.index_select(0, requests)
        if self.tree is None:
            steps = torch.arange(self.ahead, self.ahead + rows.window, device=first.device)
            return rows.flat(first.unsqueeze(1) + steps)
        depths = self.tree.of(requests).depths
        return rows.flat(first.unsqueeze(1) + depths + self.ahead)

    def split(self, sizes: Sequence[int]) -> list[RowPositions]:
        lens = self.kv_lens.split_with_sizes(list(sizes))
        trees = [None] * len(sizes) if self.tree is None else self.tree.split(sizes)
        return [RowPositions(own, self.ahead, tree) for own, tree in zip(lens, trees, strict=True)]
