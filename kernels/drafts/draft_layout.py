"""The shape of a draft tree that is known before a round: each node's parent and rank. A chain is a
tree without branches. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

MAX_NODES = 64  # of a window, the root included: ancestors are bits of an int64


@dataclass(frozen=True)
class DraftLayout:
    """Node 0 is the root (the bonus token), nodes 1 to W-1 are drafts. A parent comes before its
    children."""

    parents: tuple[int, ...]
    """-1 for the root."""
    ranks: tuple[int, ...]
    """A node is its parent's child number r, from the most probable child (0) on. 0 for the
    root."""

    def __post_init__(self) -> None:
        assert len(self.parents) == len(self.ranks) and self.parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(self.parents) if node)
        if len(self.parents) > MAX_NODES:
            raise ValueError(
                f"a draft tree has at most {MAX_NODES - 1} drafts, not {len(self.parents) - 1}"
            )

    @classmethod
    def chain(cls, num_drafts: int) -> DraftLayout:
        return cls(tuple(range(-1, num_drafts)), (0,) * (num_drafts + 1))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> DraftLayout:
        """paths: for each draft the child ranks that lead from the root to it, as Medusa's and
        EAGLE's `eagle_choices`. Nodes are ordered by depth, then by path.

        Raises ValueError if a path is empty, has a negative rank, is listed twice, or continues a
        path that is not listed."""
        nodes: dict[tuple[int, ...], int] = {(): 0}
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        parents, ranks = [-1], [0]
        for node, path in enumerate(ordered, 1):
            shown = f"eagle_choices: the path {list(path)}"
            if not path or path[-1] < 0:
                raise ValueError(f"{shown} must have one or more ranks, from 0 on")
            if path in nodes:
                raise ValueError(f"{shown} is listed twice")
            if path[:-1] not in nodes:
                raise ValueError(f"{shown} continues {list(path[:-1])}, which is not listed")
            nodes[path] = node
            parents.append(nodes[path[:-1]])
            ranks.append(path[-1])
        return cls(tuple(parents), tuple(ranks))

    @property
    def num_nodes(self) -> int:
        """W: rows of a window, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def max_depth(self) -> int:
        """D: drafts on the longest path."""
        return max(self.depths)

    @property
    def topk(self) -> int:
        """Candidates that a node needs: its largest child rank + 1."""
        return max(self.ranks) + 1

    @property
    def is_chain(self) -> bool:
        return self.max_depth == self.num_nodes - 1

    @cached_property
    def bits(self) -> tuple[int, ...]:
        """Bit j of node r: r is j or descends from j. As int64 in two's complement."""
        bits = [1]
        for node, parent in enumerate(self.parents[1:], 1):
            bits.append(bits[parent] | 1 << node)
        return tuple(value - (1 << 64) if value >> 63 else value for value in bits)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each node, in node order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], 1):
            children[parent].append(node)
        return tuple(map(tuple, children))


# Drafting a tree whose layout is known: which candidates become nodes, and which nodes the draft
# model runs next. Indices are constants on the device, so that a step is one gather.


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
