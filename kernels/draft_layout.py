"""The shape of a draft tree that is known before a round: each node's parent and rank. A chain is a
tree without branches. Pure Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
