"""The shape of a round's drafts: how many rows they add to a request's window, and how many tokens
a round may emit. A chain is a tree without branches. And the longest drafts by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil
from typing import Any

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
    whole batch; 0: every request has its whole window. `is_copied`: all drafts are copied from
    texts, and a draft network only reads."""

    depth: int
    num_nodes: int
    topk: int = 1
    choices: tuple[tuple[int, ...], ...] = ()
    mean_rows: float = 0.0
    is_copied: bool = False

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
        rows on average such as `7@4` or `5x8/31@10`; copied ones such as `7 copied`."""
        tree = f"x{self.topk}/{self.num_nodes}" if self.is_tree else " copied" * self.is_copied
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
    it is that length. With `copies` the next one is as long, of copied drafts. The tiers after it
    are `trees` to choose from, of which `longest` has at least the depth, the drafts and the
    children, and then the `budgeted` ones, whose rounds share their rows, to be compared with
    chains of `lengths`. With `narrows`, rounds of trees without branches have the shape of
    chains."""

    def __init__(
        self,
        by_length: Sequence[DraftShape],
        trees: Sequence[DraftShape] = (),
        longest: DraftShape | None = None,
        *,
        budgeted: Sequence[DraftShape] = (),
        lengths: Sequence[int] = (),
        narrows: bool = False,
        copies: bool = False,
    ) -> None:
        assert [shape.depth for shape in by_length] == list(range(len(by_length)))
        others = sorted(trees, key=lambda tree: (tree.num_nodes, tree))
        copied = [replace(by_length[-1], is_copied=True)] if copies else []
        self._all = (*by_length, *copied, *others, *sorted(budgeted))
        self.of = self._all.__getitem__
        chains = {chain_of(length): length for length in range(len(by_length))}
        tiers = {shape: tier for tier, shape in enumerate(self._all)}
        self.tier_of = ((chains if narrows else {}) | tiers).__getitem__
        self.narrows = narrows
        self.longest = longest or by_length[-1]
        self.has_trees = any(shape.is_tree for shape in self._all)
        self.are_ragged = any(shape.is_ragged for shape in self._all)
        self.further_tiers = range(len(by_length), len(self._all))
        self.copied_tier = len(by_length) if copies else None
        first = len(copied)
        self.tree_tiers = self.further_tiers[first : first + len(trees)]
        self.budgeted_tiers = self.further_tiers[first + len(trees) :]
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
    def chains(
        cls, max_draft_len: int, mean_rows: float | None = None, *, copies: bool = False
    ) -> DraftShapes:
        """mean_rows: of a request in rounds of longer chains, which share their rows; None: none
        do."""
        chains = map(chain_of, range(max_draft_len + 1))
        shares = 1 + max_draft_len if mean_rows is None else mean_rows
        shapes = [replace(c, mean_rows=shares) if c.window > shares else c for c in chains]
        return cls(shapes, copies=copies)

    @classmethod
    def with_budgets(cls, max_draft_len: int, draft_lens: Sequence[int]) -> DraftShapes:
        """Chains of every length, and for each of `draft_lens` above 2 a round that verifies the
        likeliest half of the drafts. With 2 drafts that would be hardly better than a chain of
        1."""
        lengths = [length for length in draft_lens if length]
        budgeted = [DraftShape(n, n, mean_rows=1 + n / 2) for n in lengths if n > 2]
        chains = list(map(chain_of, range(max_draft_len + 1)))
        return cls(chains, budgeted=budgeted, lengths=lengths)

    def lower(self, made: DraftShape, verified: DraftShape) -> int:
        """The tier of drafts of a shape that are verified in windows of another: the lower one; for
        chains, that of the shorter one. Copied drafts stay copied."""
        if made.is_copied and verified.depth:
            return self.tier_of(made)
        if verified.is_copied:
            verified = replace(verified, is_copied=False)
        tiers = self.tier_of(made), self.tier_of(verified)
        return min(tiers, key=lambda tier: (tier in self.tree_tiers, self.of(tier).depth, tier))

    def fitting(self, length: int, *, is_chain: bool) -> DraftShape:
        """The shape of a round whose longest draft has that length; it may have no branches."""
        return chain_of(length) if is_chain and self.narrows else self.of(length)

    def tier_within(self, num_rows: int) -> int:
        """The last tier such that it and all before it have at most `num_rows` rows a request; 0
        if there is none."""
        too_large = (tier for tier, rows in enumerate(self._rows_each) if rows > num_rows)
        return max(next(too_large, len(self._all)) - 1, 0)


# The two readings of `draft_len_schedule`, a mapping of batch sizes to draft lengths.
#
# The engine's form has lower bounds: the entry of the largest key not above the batch size holds.
# In TensorRT-LLM the two-model path reads it so. Its one-model path reads the keys as upper
# bounds: the entry of the smallest key not below the batch size holds, and above the largest key
# there are no drafts.


SCHEDULE, KEYS = "draft_len_schedule", "draft_len_schedule_keys"


def from_upper_bounds(schedule: Mapping[int, int]) -> dict[int, int]:
    """The same schedule with lower bounds: `{4: 4, 8: 2}` becomes `{1: 4, 5: 2, 9: 0}`."""
    keys = sorted(schedule)
    starts = [1, *(key + 1 for key in keys)]
    draft_lens = [*(schedule[key] for key in keys), 0]
    return dict(zip(starts, draft_lens, strict=True))


def with_lower_bounds(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a decoding type, its schedule converted if its keys are upper bounds. What is
    not a schedule stays as it is, to be refused later."""
    schedule = options.get(SCHEDULE)
    if options.get(KEYS) != "upper_bound" or not isinstance(schedule, Mapping) or not schedule:
        return dict(options)
    if not all(type(key) is int and key > 0 for key in schedule):
        return dict(options)
    return {**options, SCHEDULE: from_upper_bounds(schedule), KEYS: "lower_bound"}


def checked_schedule(
    schedule: Mapping[int, int], max_draft_len: int, keys: str | None
) -> dict[int, int]:
    """The schedule, sorted. keys: None if the user did not say what the keys are.

    Raises ValueError for what is not a schedule, or has two readings."""
    if not schedule:
        raise ValueError("it has no entry; null means no schedule")
    if min(schedule) < 1 or min(schedule.values()) < 0:
        raise ValueError("batch sizes start at 1 and draft lengths at 0")
    if max(schedule.values()) > max_draft_len:
        raise ValueError(f"a draft length exceeds max_draft_len = {max_draft_len}")
    in_order = dict(sorted(schedule.items()))
    if keys is None and min(schedule) > 1:
        raise ValueError(_both_readings(in_order, max_draft_len))
    return in_order


def _both_readings(schedule: Mapping[int, int], max_draft_len: int) -> str:
    lower, upper = {1: max_draft_len, **schedule}, from_upper_bounds(schedule)
    return (
        "the smallest key is above 1, so it has two readings; "
        f"with {KEYS}: lower_bound it means {_ranges(lower)}; "
        f"with {KEYS}: upper_bound, as TensorRT-LLM's one-model path reads it, {_ranges(upper)}"
    )


def _ranges(lower: Mapping[int, int]) -> str:
    """`{1: 4, 5: 0}` as "4 drafts for 1-4 requests, 0 for 5 and more"."""
    starts = sorted(lower)
    lasts = [after - 1 for after in starts[1:]]
    batch_sizes = [
        str(start) if start == last else f"{start}-{last}"
        for start, last in zip(starts, lasts, strict=False)
    ]
    first, *others = [*batch_sizes, f"{starts[-1]} and more"]
    texts = [f"{lower[start]} for {sizes}" for start, sizes in zip(starts[1:], others, strict=True)]
    return ", ".join([f"{lower[starts[0]]} drafts for {first} requests", *texts])


def draft_len_table(
    draft_len: int | None, schedule: Mapping[int, int] | None, max_concurrency: int | None
) -> dict[int, int]:
    """The longest draft length by batch size: the entry of the largest key not above it holds.
    draft_len: of all rounds that neither option limits; None: an adaptive policy chooses. Of the
    two options only one is set."""
    limits = schedule or ({max_concurrency + 1: 0} if max_concurrency else {})
    return {**({} if draft_len is None else {0: draft_len}), **limits}
