"""How likely each further child of a node is accepted, given that those before it were not. What
paths showed is a table of `path_ranks`; all depths share one estimate."""

from collections import Counter
from collections.abc import Sequence

from tllm_spec.kernels.drafts.rank_codes import END, NOTHING, OFF_CHAIN

MIN_ROUNDS = 8  # memory in rounds, where few rounds fill the window
PRIOR_TRIALS = 8.0  # nodes that the prior counts for
FIRST_PRIOR = 0.7  # over the rank's number from 1 on, e.g. 0.35 for the second child
Columns = Sequence[Counter[int]]  # by depth: how often each value of `path_ranks` was seen


def columns_of(ranks: Sequence[Sequence[int]]) -> list[Counter[int]]:
    """ranks: by request, as `path_ranks` shows them."""
    return [Counter(column) for column in zip(*ranks, strict=True)]


def chain_counts(columns: Columns) -> list[tuple[int, int]]:
    """By depth: paths of first children that tried one more, and those whose first child was
    accepted. These are what a chain would have shown."""
    counts = []
    for column in columns:
        own = {value: number for value, number in column.items() if NOTHING < value < OFF_CHAIN}
        counts.append((sum(own.values()) - own.get(END, 0), own.get(0, 0)))
    return counts


class RankEstimate:
    """Acceptance of up to K children of a node. `shares` `[K]`: by rank; that of rank 0 means
    nothing."""

    def __init__(self, topk: int, window: float) -> None:
        self._window = window
        self._tried, self._accepted = [0.0] * topk, [0.0] * topk
        self._prior = [FIRST_PRIOR / (rank + 1) for rank in range(topk)]

    def observe(self, num_requests: int, columns: Columns) -> None:
        keep = 1 - 1 / max(self._window / num_requests, MIN_ROUNDS)
        for counts in (self._tried, self._accepted):
            counts[:] = [keep * count for count in counts]
        for column in columns:
            for value, number in column.items():
                if value != NOTHING:
                    self._count(value % OFF_CHAIN, number)

    @property
    def shares(self) -> list[float]:
        counts = zip(self._accepted, self._tried, self._prior, strict=True)
        return [
            (accepted + PRIOR_TRIALS * prior) / (tried + PRIOR_TRIALS)
            for accepted, tried, prior in counts
        ]

    def _count(self, value: int, number: int) -> None:
        most = len(self._tried)
        if value < END:
            num_tried = min(value + 1, most)
            if 0 < value < most:
                self._accepted[value] += number
        else:
            num_tried = min(value - END, most)
        for rank in range(1, num_tried):
            self._tried[rank] += number


def by_rank(first: float, shares: Sequence[float]) -> list[float]:
    """The probability of each child of a node. first: of its first; shares: of RankEstimate."""
    found, left = [first], 1 - first
    for share in shares[1:]:
        found.append(left * share)
        left *= 1 - share
    return found
