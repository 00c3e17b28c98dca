"""The shape of a round's drafts: how many rows they add to a request's window, and how many tokens
a round may emit. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, order=True)
class DraftShape:
    """`depth`: drafts on the longest path. `num_nodes`: drafts in a window. `topk`: children of a
    node, at most. `choices`: of a static tree, the child ranks that lead to each draft."""

    depth: int
    num_nodes: int
    topk: int = 1
    choices: tuple[tuple[int, ...], ...] = ()

    @property
    def window(self) -> int:
        """Rows of a request in a round: the bonus token, then the drafts."""
        return 1 + self.num_nodes

    @property
    def path(self) -> int:
        """Tokens that a round may emit for a request: accepted drafts and the target's own."""
        return 1 + self.depth

    @property
    def is_tree(self) -> bool:
        return self.topk > 1 or bool(self.choices)

    @property
    def num_read(self) -> int:
        """Drafts that a draft network reads to draft the others: of a static tree those with
        children, else the best `topk` of every step but the last."""
        if self.choices:
            return len({path[:-1] for path in self.choices if len(path) > 1})
        return max(self.depth - 1, 0) * self.topk

    @property
    def num_beams(self) -> int:
        """Rows of a request in a draft network's forward, at most."""
        return self.num_nodes if self.choices else self.topk


@cache
def chain_of(length: int) -> DraftShape:
    return DraftShape(length, length)


NO_DRAFTS = chain_of(0)


class DraftShapes:
    """The shape of every draft length from 0 on."""

    def __init__(self, by_length: Sequence[DraftShape]) -> None:
        assert [shape.depth for shape in by_length] == list(range(len(by_length)))
        self.of = tuple(by_length).__getitem__
        self.longest = by_length[-1]
        self.has_trees = any(shape.is_tree for shape in by_length)
        self._windows = [shape.window for shape in by_length]

    @classmethod
    def chains(cls, max_draft_len: int) -> DraftShapes:
        return cls([chain_of(length) for length in range(max_draft_len + 1)])

    def length_within(self, num_rows: int) -> int:
        """The longest draft whose window has at most `num_rows` rows; 0 if there is none."""
        return max(sum(window <= num_rows for window in self._windows) - 1, 0)
