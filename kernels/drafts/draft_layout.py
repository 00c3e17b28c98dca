"""Draft trees on the host, and drafting a static tree, which is one that is known before a round.
A chain is a tree without branches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NamedTuple

import torch

MAX_NODES = 64  # of a window, the root included: ancestors are bits of an int64
_ROW_BITS = [1 << row for row in range(1, MAX_NODES)]
# Rows of padding follow the root and are never accepted.
_PADDING_BITS = [1 | 1 << row for row in range(MAX_NODES - 1)] + [1 - (1 << 63)]


class HostTree(NamedTuple):
    """A draft tree of one request. `tokens` of the drafts, by depth. The others are of the window's
    rows, of which the first is the root: `parents` (-1 for the root), `depths`, and `bits`: bit j
    of row r: r is j or descends from j, as int64. A static tree has ranks as tokens: a node is its
    parent's child number r, from the most probable one (0) on."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    bits: list[int]

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[Any]]) -> HostTree:
        """Equal beginnings of paths become one. Raises TypeError for what is no token id."""
        tokens, parents, depths, children = list[int](), list[int](), [0], [dict[int, int]()]
        for path in paths:
            node = 0
            for token in map(index, path):
                child = children[node].get(token)
                if child is None:
                    tokens.append(token)
                    parents.append(node)
                    depths.append(depths[node] + 1)
                    child = children[node][token] = len(tokens)
                    children.append({})
                node = child
        _check_number(len(tokens))
        ordered = sorted(depths)
        if ordered != depths:
            nodes = sorted(range(len(depths)), key=depths.__getitem__)
            row_of = dict(zip(nodes, range(len(nodes)), strict=True))
            tokens = [tokens[node - 1] for node in nodes[1:]]
            parents = [row_of[parents[node - 1]] for node in nodes[1:]]
        bits = [1]
        for parent, own in zip(parents, _ROW_BITS, strict=False):
            bits.append(bits[parent] | own)
        if len(bits) == MAX_NODES:
            bits[-1] -= 1 << 64
        return cls(tokens, [-1, *parents], ordered, bits)

    @classmethod
    def of_parents(cls, tokens: Sequence[Any], parents: Sequence[Any]) -> HostTree:
        """parents: of each token, 0 for the root and n for the n-th token. Raises TypeError for
        what is no number, and ValueError for more rows than there are bits, a parent that is not
        an earlier node, and equal children of a node."""
        if len(tokens) != len(parents):
            raise ValueError(f"{len(tokens)} tokens have {len(parents)} parents")
        _check_number(len(tokens))
        paths: list[tuple[int, ...]] = [()]
        for node, (token, parent) in enumerate(zip(tokens, map(index, parents), strict=True), 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents: node {node} has the parent {parent}; accepted are 0 to {node - 1}"
                )
            path = (*paths[parent], index(token))
            if path in paths:
                raise ValueError(
                    f"nodes {paths.index(path)} and {node} are both {token} after node {parent}"
                )
            paths.append(path)
        return cls.of_paths(paths)

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self.tokens)

    def up_to(self, depth: int) -> HostTree:
        """The tree without deeper drafts."""
        rows = bisect_right(self.depths, depth)
        if rows == len(self.depths):
            return self
        parents, depths, bits = (each[:rows] for each in self[1:])
        return HostTree(self.tokens[: rows - 1], parents, depths, bits)

    def padded(self, width: int, token: int) -> tuple[list[int], ...]:
        """The tree in `width` rows. Those of padding have this token, follow the root and are never
        accepted."""
        rows = len(self.parents)
        more, bits = width - rows, _PADDING_BITS[rows:width]
        added = [token] * more, [0] * more, [1] * more, bits
        return tuple(own + rest for own, rest in zip(self, added, strict=True))


def _check_number(num_tokens: int) -> None:
    if num_tokens >= MAX_NODES:
        raise ValueError(f"a tree has at most {MAX_NODES - 1} tokens, not {num_tokens}")


# Drafting a tree that is known: which candidates become nodes, and which nodes the draft model runs
# next. Indices are constants on the device, so that a step is one gather.


class StaticStep(NamedTuple):
    """Draft step s: the candidates of its P parents become the n nodes of depth s + 1. The parents
    are the root in step 0, and then the nodes that the draft model has just run."""

    candidates: torch.Tensor
    """`[n]` int64: node i is candidate `parent row * topk + rank`."""
    runs: torch.Tensor
    """`[R]` int64: those of the n nodes that have children. The draft model runs them next."""
    parent_rows: torch.Tensor
    """`[R]` int64: the row, among the P parents, of each of these nodes' parents."""
    bits: torch.Tensor
    """`[R]` int64: which rows each of them sees among all rows that the draft model has run in
    this round, in order, its own step's R rows included: bit j is row j."""


def static_steps(tree: HostTree, topk: int, device: torch.device) -> list[StaticStep]:
    """The steps of a tree of ranks, `tree.depth` of them. topk: candidates of a parent, more than
    the highest rank. The last step runs nothing."""
    steps, parents, seen = list[StaticStep](), [0], {0: 0}
    for depth in range(1, tree.depth + 1):
        nodes = [node for node, own in enumerate(tree.depths) if own == depth]
        running = [node for node in nodes if node in tree.parents]
        for node in running:  # one with children is never the 64th row, so bit 63 is not needed
            seen[node] = seen[tree.parents[node]] | 1 << len(seen) - 1
        rows = {node: parents.index(tree.parents[node]) for node in nodes}
        tables = (
            [rows[node] * topk + tree.tokens[node - 1] for node in nodes],
            [nodes.index(node) for node in running],
            [rows[node] for node in running],
            [seen[node] for node in running],
        )
        steps.append(StaticStep(*(torch.tensor(each, device=device).long() for each in tables)))
        parents = running
    return steps
