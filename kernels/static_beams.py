"""Drafting a tree whose layout is known: which candidates become nodes, and which nodes the draft
model runs next. Indices are constants on the device, so that a step is one gather."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.draft_layout import DraftLayout


@dataclass(frozen=True)
class StaticStep:
    """Draft step s of a layout: the candidates of its P parents become the n nodes of depth s + 1.
    The parents are the root in step 0, and then the nodes that the draft model has just run."""

    topk: int
    candidates: torch.Tensor
    """`[n]` int64: node i is candidate `parent row * topk + rank`."""
    nodes: torch.Tensor
    """`[n]` int64: the nodes' numbers in the layout."""
    runs: torch.Tensor
    """`[R]` int64: those of the n nodes that have children. The draft model runs them next."""
    parent_rows: torch.Tensor
    """`[R]` int64: the row, among the P parents, of each of these nodes' parents."""
    bits: torch.Tensor
    """`[R]` int64: which rows each of them sees among all rows that the draft model has run in
    this round, in order, its own step's R rows included: bit j is row j."""

    def take(self, tokens: torch.Tensor) -> torch.Tensor:
        """Node tokens `[B, n]` of candidates `[B, P, topk]`, best first."""
        return tokens.flatten(1).index_select(1, self.candidates)


def static_steps(layout: DraftLayout, device: torch.device) -> list[StaticStep]:
    """The steps of a layout, `layout.max_depth` of them. The last one runs nothing."""
    steps, parents, rows_run = [], [0], dict[int, int]()
    for depth in range(1, layout.max_depth + 1):
        nodes = [node for node, own in enumerate(layout.depths) if own == depth]
        row_of = {parent: row for row, parent in enumerate(parents)}
        running = [node for node in nodes if layout.children[node]]
        rows_run |= {node: len(rows_run) + row for row, node in enumerate(running)}
        tables = (
            [row_of[layout.parents[node]] * layout.topk + layout.ranks[node] for node in nodes],
            nodes,
            [nodes.index(node) for node in running],
            [row_of[layout.parents[node]] for node in running],
            [_row_bits(layout, node, rows_run) for node in running],
        )
        tensors = (torch.tensor(table, dtype=torch.int64, device=device) for table in tables)
        steps.append(StaticStep(layout.topk, *tensors))
        parents = running
    return steps


def _row_bits(layout: DraftLayout, node: int, rows_run: dict[int, int]) -> int:
    """A node that has children is never the 64th row, so bit 63 is not needed."""
    bits = 0
    while node > 0:
        bits |= 1 << rows_run[node]
        node = layout.parents[node]
    return bits
