"""A draft tree that is made on the host."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import index
from typing import Any, NamedTuple

from tllm_spec.kernels.drafts.draft_layout import MAX_NODES

_ROW_BITS = [1 << row for row in range(1, MAX_NODES)]
# Rows of padding follow the root and are never accepted.
_PADDING_BITS = [1 | 1 << row for row in range(MAX_NODES - 1)] + [1 - (1 << 63)]


class HostTree(NamedTuple):
    """A draft tree of one request. `tokens` of the drafts, by depth. The others are of the window's
    rows, of which the first is the root: `parents` (-1 for the root), `depths`, and `bits`: bit j
    of row r: r is j or descends from j, as int64."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    bits: list[int]

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[Any]]) -> "HostTree":
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
        return cls._in_rows(tokens, parents, depths)

    @classmethod
    def of_parents(cls, tokens: Sequence[Any], parents: Sequence[Any]) -> "HostTree":
        """parents: of each token, 0 for the root and n for the n-th token. Raises TypeError for
        what is no number, and ValueError for more rows than there are bits, a parent that is not
        an earlier node, and equal children of a node."""
        if len(tokens) != len(parents):
            raise ValueError(f"{len(tokens)} tokens have {len(parents)} parents")
        _check_number(len(tokens))
        tokens, parents = list(map(index, tokens)), list(map(index, parents))
        depths = [0]
        for node, parent in enumerate(parents, 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents: node {node} has the parent {parent}; accepted are 0 to {node - 1}"
                )
            depths.append(depths[parent] + 1)
        children = list(zip(parents, tokens, strict=True))
        if len(set(children)) < len(children):
            repeated = next(i for i, child in enumerate(children) if child in children[:i])
            raise ValueError(
                f"nodes {1 + children.index(children[repeated])} and {1 + repeated} are both "
                f"{tokens[repeated]} after node {parents[repeated]}"
            )
        return cls._in_rows(tokens, parents, depths)

    @classmethod
    def _in_rows(cls, tokens: list[int], parents: list[int], depths: list[int]) -> "HostTree":
        """A tree whose nodes are in any order, parents before their children. depths: of the root,
        too."""
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

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self.tokens)

    def up_to(self, depth: int) -> "HostTree":
        """The tree without deeper drafts."""
        rows = bisect_right(self.depths, depth)
        if rows == len(self.depths):
            return self
        parents, depths, bits = (each[:rows] for each in self[1:])
        return HostTree(self.tokens[: rows - 1], parents, depths, bits)


def tree_of(tokens: Any, parents: Any) -> HostTree:
    """The tree that a drafter proposes: a list of tokens with or without parents, or of paths.
    Raises TypeError and ValueError as `HostTree.of_parents`."""
    if parents is not None:
        return HostTree.of_parents(tokens, parents)
    tokens = list(tokens)
    is_chain = not any(isinstance(each, (list, tuple)) for each in tokens)
    return HostTree.of_paths([tokens] if is_chain else tokens)


def numbers_of(
    trees: Sequence[HostTree], slot_ids: Sequence[int], width: int, padding: Sequence[int]
) -> "array[int]":
    """What is sent: slots `[B]`, numbers of drafts `[B]`, tokens `[B, width - 1]`, parents, depths
    and bits `[B, width]`, one after the other. Rows of padding follow the root and are never
    accepted; their tokens are `padding` `[B]`."""
    return array(
        "q",
        chain(
            slot_ids,
            (len(tree.tokens) for tree in trees),
            *(
                tree.tokens + [token] * (width - len(tree.parents))
                for tree, token in zip(trees, padding, strict=True)
            ),
            *(tree.parents + [0] * (width - len(tree.parents)) for tree in trees),
            *(tree.depths + [1] * (width - len(tree.parents)) for tree in trees),
            *(tree.bits + _PADDING_BITS[len(tree.parents) : width] for tree in trees),
        ),
    )


def _check_number(num_tokens: int) -> None:
    if num_tokens >= MAX_NODES:
        raise ValueError(f"a tree has at most {MAX_NODES - 1} tokens, not {num_tokens}")
