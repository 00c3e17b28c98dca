"""The draft trees of a round's B requests in numpy arrays: no loop over requests, paths or nodes.

For many requests; for few of them `HostTree` is quicker, and it says what is wrong with a tree."""

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tllm_spec.kernels.draft_layout import MAX_NODES

Ints = npt.NDArray[np.int64]
_LAST = 127  # sorts after every depth and path


class Room(NamedTuple):
    """How many children a node may have, and how many nodes a tree."""

    topk: int
    max_nodes: int


UNLIMITED = Room(MAX_NODES, MAX_NODES)


class Nodes(NamedTuple):
    """Trees of up to N nodes as they are proposed, parents before their children.

    `tokens` and `parents` `[B, N]` of nodes 1 to N, of which each tree has the first `counts`
    `[B]`. A parent is 0, the root, or a node."""

    tokens: Ints
    parents: Ints
    counts: Ints

    @property
    def are_trees(self) -> bool:
        """Whether every parent is an earlier node and no two children of a node are equal."""
        number = np.arange(self.tokens.shape[1])
        # What a tree does not have is different from everything.
        children = np.where(
            number < self.counts[:, None], self.parents << 32 | self.tokens, -1 - number
        )
        children.sort(axis=1)
        return bool((self.parents <= number).all() and np.diff(children, axis=1).all())


class Rows(NamedTuple):
    """Trees in the order of a window's rows: the root, then the drafts by depth. `tokens` `[B, N]`,
    the others `[B, 1 + N]`, see `DraftTree`. Drafts after the first `counts` `[B]` do not count."""

    tokens: Ints
    parents: Ints
    depths: Ints
    bits: Ints
    counts: Ints

    @property
    def tree_depths(self) -> Ints:
        """`[B]`."""
        return self.depths[np.arange(len(self.counts)), self.counts]

    def up_to(self, limits: Ints) -> "Rows":
        """Without drafts that are deeper than `limits` `[B]`."""
        number = np.arange(self.depths.shape[1])
        kept = (self.depths <= limits[:, None]) & (number <= self.counts[:, None])
        return self._replace(counts=kept.sum(axis=1) - 1)

    @property
    def drafts(self) -> list[list[int]]:
        """The tokens of each tree."""
        sizes = self.counts.tolist()
        return [row[:size] for row, size in zip(self.tokens.tolist(), sizes, strict=True)]

    def numbers(self, slot_ids: Sequence[int], width: int, padding: Sequence[int]) -> Ints:
        """What is sent: slots `[B]`, numbers of drafts `[B]`, tokens `[B, width - 1]`, parents,
        depths and bits `[B, width]`, one after the other. Rows of padding follow the root and are
        never accepted; their tokens are `padding` `[B]`."""
        batch, num_rows = self.depths.shape
        is_row = np.arange(num_rows) <= self.counts[:, None]
        tokens = np.repeat(np.array(padding)[:, None], width - 1, axis=1)
        np.copyto(tokens[:, : num_rows - 1], self.tokens, where=is_row[:, 1:])
        table = np.empty((3, batch, width), np.int64)
        table[0], table[1], table[2] = 0, 1, 1 | np.left_shift(1, np.arange(width))
        for rows, values in zip(table[..., :num_rows], self[1:4], strict=True):
            np.copyto(rows, values, where=is_row)
        return np.concatenate([slot_ids, self.counts, tokens.reshape(-1), table.reshape(-1)])


def read_trees(proposals: Sequence[tuple[Any, Any]], room: Room) -> Rows:
    """Of each of B requests what its drafter proposes: paths or tokens, and the tokens' parents or
    None.

    Raises TypeError, ValueError or OverflowError for what are no trees, and for some that are."""
    if any(parents is not None for _, parents in proposals):
        return in_rows(_with_parents(proposals))
    paths = to_array(
        [each if set(map(type, each)) <= {list, tuple} else [each] for each, _ in proposals]
    )
    if max(paths.shape[:2]) > MAX_NODES:
        raise ValueError(f"too many paths or too long ones: {paths.shape}")
    return in_rows(merge(paths, room))


def _with_parents(proposals: Sequence[tuple[Any, Any]]) -> Nodes:
    tokens, parents = to_array(
        [(each, range(len(each)) if above is None else above) for each, above in proposals]
    )
    counts = (tokens >= 0).sum(axis=0)
    trees = Nodes(tokens.T.clip(0), parents.T.clip(0), counts)
    if not ((parents >= 0).sum(axis=0) == counts).all() or not trees.are_trees:
        raise ValueError("parents that are no earlier nodes, or equal children")
    return trees


def to_array(lists: Sequence[Sequence[Sequence[int]]]) -> Ints:
    """For each of B requests M lists of up to L natural numbers as `[M, L, B]`, -1 after the ends.

    Raises TypeError for what is no integer, OverflowError or ValueError for what is too large or
    negative."""
    flat = list(chain.from_iterable(lists))
    values = np.array(array("q", list(chain.from_iterable(flat))))
    if values.min(initial=0) < 0:
        raise ValueError(f"{values.min()} is negative")
    counts, lens = (np.fromiter(map(len, each), np.int64, len(each)) for each in (lists, flat))
    number, position = np.arange(counts.max(initial=0)), np.arange(lens.max(initial=0))
    lens_of = np.zeros((len(lists), len(number)), np.int64)
    lens_of[number < counts[:, None]] = lens
    table = np.full((*lens_of.shape, len(position)), -1)
    table[position < lens_of[..., None]] = values
    return np.ascontiguousarray(table.transpose(1, 2, 0))


def merge(paths: Ints, room: Room) -> Nodes:
    """See `HostTree.of_paths`. paths: `[M, L, B]`, see `to_array`; M is at most 64."""
    length, batch = paths.shape[1:]
    number = np.arange(len(paths), dtype=np.int8)[:, None, None]
    # Axes: a path, that which it is compared with, L, B. Numpy is quick if the last ones are long.
    is_same = paths[:, None] == paths
    for level in range(1, length):
        is_same[:, :, level] &= is_same[:, :, level - 1]
    first = np.where(is_same, number[:, None], np.int8(_LAST)).min(axis=0, initial=_LAST)
    is_node = (first == number) & (paths >= 0)
    if len(paths) > room.topk:
        is_older_child = is_node[:, None] & (number[:, None] < number)
        is_older_child[:, :, 1:] &= is_same[:, :, :-1]
        is_node &= is_older_child.sum(axis=0, dtype=np.int8) < room.topk
    request = np.arange(batch)
    for level in range(1, length):
        is_node[:, level] &= is_node[first[:, level - 1], level - 1, request]
    # From 1 on, path by path: where the tree has no room, it has none for what follows.
    nodes = is_node.reshape(-1, batch).cumsum(axis=0).reshape(paths.shape)
    is_node &= nodes <= room.max_nodes
    parents_of = np.zeros_like(paths)
    for level in range(1, length):
        parents_of[:, level] = nodes[first[:, level - 1], level - 1, request]
    counts = is_node.sum(axis=(0, 1))
    tokens, parents = np.zeros((2, batch, counts.max(initial=0)), np.int64)
    place = is_node.nonzero()[2], nodes[is_node] - 1
    tokens[place], parents[place] = paths[is_node], parents_of[is_node]
    return Nodes(tokens, parents, counts)


def in_rows(trees: Nodes) -> Rows:
    """Trees that `are_trees`; their padding has no meaning yet."""
    batch, num_rows = trees.tokens.shape[0], trees.tokens.shape[1] + 1
    number, start = np.arange(num_rows), np.arange(0, batch * num_rows, num_rows)[:, None]
    tokens, parents, depths = np.zeros((3, batch, num_rows), np.int64)
    tokens[:, 1:], parents[:, 1:] = trees.tokens, trees.parents
    above = (parents + start).reshape(-1)
    node, paths = start + number, list[Ints]()
    while (is_draft := node > start).any():
        depths += is_draft
        paths.append(node)
        node = above[node]
    depths[number > trees.counts[:, None]] = _LAST
    order = np.argsort(depths, axis=1, kind="stable") + start
    row_of = np.empty(order.size, np.int64)
    row_of[order] = number
    bits, own_bits = np.ones_like(parents), np.left_shift(1, row_of)
    for node in paths:
        bits |= own_bits[node]
    parents = row_of[above[order]]
    parents[:, 0] = -1
    tokens, depths, bits = (each.reshape(-1)[order] for each in (tokens, depths, bits))
    return Rows(tokens[:, 1:], parents, depths, bits, trees.counts)
