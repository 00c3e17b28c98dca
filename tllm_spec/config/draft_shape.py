"""The shape of a round's drafts: how many rows they add to a request's window, and how many tokens
a round may emit. A chain is a tree without branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil

MAX_DRAFT_LEN = 1 << 16  # each length up to the longest has a shape of its own
MAX_BUDGETS = 32  # that a round says the outcome of
# Up to this batch size whole windows cost little, since reading the weights takes longer than
# computing the rows. More than this number of rows take any GPU longer than reading the weights.
MAX_WHOLE_BATCH, MAX_WHOLE_ROWS = 16, 512
# What `path_ranks` shows: column d of a request says how its path of d drafts went on. It has the
# rank of the next child (0 is the first in node order), or END + the number of children, of which
# none was accepted.
END = 64
OFF_CHAIN = 128  # added where a draft before was not its node's first child
NOTHING = -1  # after the path's end


@dataclass(frozen=True, order=True)
class DraftShape:
    """`depth`: drafts on the longest path. `num_nodes`: drafts in a window. `topk`: children of a
    node, at most. `choices`: of a static tree, the child ranks that lead to each draft.
    `mean_rows`: rows that a request has on average in a round that verifies the best drafts of the
    whole batch; 0: every request has its whole window."""

    depth: int
    num_nodes: int
    topk: int = 1
    choices: tuple[tuple[int, ...], ...] = ()
    mean_rows: float = 0.0

    @cached_property
    def window(self) -> int:
        """Rows of a request in a round: the bonus token, then the drafts."""
        return 1 + self.num_nodes

    @property
    def rows_each(self) -> float:
        """Rows of a request on average."""
        return self.mean_rows if self.is_ragged else self.window

    @cached_property
    def is_ragged(self) -> bool:
        """Whether requests may have different numbers of rows in a round."""
        return 0 < self.mean_rows < self.window

    def num_rows(self, batch_size: int) -> int:
        """Rows of a round of that many requests."""
        whole = batch_size * self.window
        if not self.is_ragged:
            return whole
        return min(whole, max(batch_size, ceil(batch_size * self.mean_rows)))

    def is_compared(self, batch_size: int) -> bool:
        """Whether the shape is worth comparing in rounds of so many requests."""
        if not self.is_ragged:
            return self.num_nodes < max(MAX_WHOLE_ROWS // batch_size, 2)
        return batch_size > MAX_WHOLE_BATCH

    @cached_property
    def path(self) -> int:
        """Tokens that a round may emit for a request: accepted drafts and the target's own."""
        return 1 + self.depth

    @property
    def tokens_each(self) -> float:
        """Tokens of a request on average, at most."""
        return min(self.path, self.rows_each)

    def contains(self, other: DraftShape) -> bool:
        """Whether drafts of this shape have those of the other one, which may be fewer."""
        return other.depth <= self.depth and other.topk <= self.topk

    @cached_property
    def is_tree(self) -> bool:
        return self.topk > 1 or bool(self.choices)

    @property
    def name(self) -> str:
        """A chain's length, or a tree such as `5x8/31`: steps, children of a node, drafts. With
        rows on average such as `7@4` or `5x8/31@10`."""
        tree = f"x{self.topk}/{self.num_nodes}" if self.is_tree else ""
        return f"{self.depth}{tree}" + (f"@{self.mean_rows:g}" if self.is_ragged else "")

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
    """The shapes that rounds may have, by tier. A tier is a number: up to the longest draft length
    it is that length. The tiers after it are `trees` to choose from, of which `longest` has at
    least the depth, the drafts and the children, and then the `budgeted` ones, whose rounds share
    their rows, to be compared with chains of `lengths`. With `narrows`, rounds of trees without
    branches have the shape of chains."""

    def __init__(
        self,
        by_length: Sequence[DraftShape],
        trees: Sequence[DraftShape] = (),
        longest: DraftShape | None = None,
        *,
        budgeted: Sequence[DraftShape] = (),
        lengths: Sequence[int] = (),
        narrows: bool = False,
    ) -> None:
        assert [shape.depth for shape in by_length] == list(range(len(by_length)))
        others = sorted(trees, key=lambda tree: (tree.num_nodes, tree))
        self._all = (*by_length, *others, *sorted(budgeted))
        self.of = self._all.__getitem__
        chains = {chain_of(length): length for length in range(len(by_length))}
        tiers = {shape: tier for tier, shape in enumerate(self._all)}
        self.tier_of = ((chains if narrows else {}) | tiers).__getitem__
        self.narrows = narrows
        self.longest = longest or by_length[-1]
        self.has_trees = any(shape.is_tree for shape in self._all)
        self.are_ragged = any(shape.is_ragged for shape in self._all)
        self.further_tiers = range(len(by_length), len(self._all))
        self.tree_tiers = self.further_tiers[: len(trees)]
        self.budgeted_tiers = self.further_tiers[len(trees) :]
        # Draft lengths, and the names of the tiers after them.
        names = [*range(len(by_length)), *(self._all[tier].name for tier in self.further_tiers)]
        self.name = names.__getitem__
        self._rows_each = [shape.rows_each for shape in self._all]
        depths = [shape.depth for shape in self._all]
        # Ascending by depth: a round shows what all that its drafts contain would bring.
        self.compared_tiers = sorted((*lengths, *self.budgeted_tiers), key=depths.__getitem__)

    @property
    def budgets(self) -> list[tuple[int, float]]:
        """Draft length and mean rows of a request, for each of `compared_tiers`."""
        compared = [self._all[tier] for tier in self.compared_tiers]
        return [(shape.depth, shape.rows_each) for shape in compared]

    @classmethod
    def chains(cls, max_draft_len: int, mean_rows: float | None = None) -> DraftShapes:
        """mean_rows: of a request in rounds of longer chains, which share their rows; None: none
        do."""
        chains = map(chain_of, range(max_draft_len + 1))
        shares = 1 + max_draft_len if mean_rows is None else mean_rows
        return cls([replace(c, mean_rows=shares) if c.window > shares else c for c in chains])

    @classmethod
    def with_budgets(cls, max_draft_len: int, draft_lens: Sequence[int]) -> DraftShapes:
        """Chains of every length, and for each of `draft_lens` above 2 a round that verifies the
        likeliest half of the drafts. With 2 drafts that would be hardly better than a chain of
        1."""
        lengths = [length for length in draft_lens if length]
        budgeted = [DraftShape(n, n, mean_rows=1 + n / 2) for n in lengths if n > 2]
        chains = list(map(chain_of, range(max_draft_len + 1)))
        return cls(chains, budgeted=budgeted, lengths=lengths)

    def lower(self, one: DraftShape, other: DraftShape) -> int:
        """The lower tier of the two; for chains, that of the shorter one."""
        tiers = self.tier_of(one), self.tier_of(other)
        return min(tiers, key=lambda tier: (tier in self.tree_tiers, self.of(tier).depth, tier))

    def fitting(self, length: int, *, is_chain: bool) -> DraftShape:
        """The shape of a round whose longest draft has that length; it may have no branches."""
        return chain_of(length) if is_chain and self.narrows else self.of(length)

    def tier_within(self, num_rows: int) -> int:
        """The last tier such that it and all before it have at most `num_rows` rows a request; 0
        if there is none."""
        too_large = (tier for tier, rows in enumerate(self._rows_each) if rows > num_rows)
        return max(next(too_large, len(self._all)) - 1, 0)
