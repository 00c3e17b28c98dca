"""Expected accepted drafts by tier: of chains from acceptance by position, of trees from acceptance
by depth and rank."""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN, DraftShape, DraftShapes
from tllm_spec.executor.speculative.draft_length.tier_policy import ObservedRound

# How likely a draft at each position of the window is accepted, given that all before it were.
#
# A decayed count per position. A position with little evidence follows the average of the others.


MIN_RATE, MAX_RATE = 0.001, 0.999  # an estimate never becomes certain
PRIOR_TRIALS = 4.0  # drafts that the prior counts for, and that an old estimate fades to
PRIOR_ROUNDS = 64.0  # after which the prior is about what was seen, even if that is old by now
SHARED_TRIALS = 8.0  # drafts that the average of all positions counts for at each of them
MIN_ROUNDS = 8  # memory in rounds, where few rounds fill the window
UNSEEN_SHARE = 0.25  # of the window, that positions beyond the present draft length fade to
IDLE_REQUESTS = 8  # a round without drafts ages an estimate as so many requests do


class AcceptanceEstimate:
    """Acceptance by position. A round of K drafts of which n were accepted shows positions 1 to
    min(n + 1, K).

    rates: by position. expected_accepted `[K + 1]`: expected accepted drafts by draft length. The
    memory is `window` drafts per position. Without new drafts a count's weight fades and its value
    stays: an old bad estimate is not retried for its age, but one probe then moves it far."""

    def __init__(self, num_positions: int, prior: float, window: float) -> None:
        self._prior, self._window = prior, window
        self._reached = [0.0] * num_positions
        self._accepted = [0.0] * num_positions
        self.rates = [prior] * num_positions
        self.expected_accepted = list(accumulate(accumulate(self.rates, mul), initial=0.0))

    def observe(self, num_requests: int, num_accepted: Sequence[int], draft_len: int) -> None:
        """num_accepted: of every request that was drafted for, with `draft_len` drafts each."""
        has_drafts = draft_len > 0 and len(num_accepted) > 0
        if has_drafts:
            self._age(num_requests, max(PRIOR_TRIALS, UNSEEN_SHARE * self._window))
        else:
            self._age(max(num_requests, IDLE_REQUESTS), PRIOR_TRIALS)
        if has_drafts and self.rates:
            self._count(num_accepted, min(draft_len, len(self.rates)))
            self._combine()

    def observe_counts(self, num_requests: int, counts: Sequence[tuple[int, int]]) -> None:
        """counts: by position, requests that reached it and those whose draft was accepted."""
        self._age(num_requests, max(PRIOR_TRIALS, UNSEEN_SHARE * self._window))
        for position, (reached, accepted) in enumerate(counts[: len(self.rates)]):
            self._reached[position] += reached
            self._accepted[position] += accepted
        self._combine()

    def _age(self, num_requests: int, least: float) -> None:
        keep = 1 - 1 / max(self._window / num_requests, MIN_ROUNDS)
        for position, reached in enumerate(self._reached):
            if reached > least:
                factor = max(keep, least / reached)
                self._reached[position] *= factor
                self._accepted[position] *= factor

    def _count(self, num_accepted: Sequence[int], draft_len: int) -> None:
        # `bytes.count` takes a tenth of a list's time; a byte holds at most 255.
        lengths = bytes(num_accepted) if max(num_accepted) < 256 else num_accepted
        reached = len(num_accepted)
        for position in range(draft_len):
            if not reached:
                break
            self._reached[position] += reached
            reached -= lengths.count(position)
            self._accepted[position] += reached

    def _combine(self) -> None:
        trials = sum(self._reached) + PRIOR_TRIALS
        level = (sum(self._accepted) + PRIOR_TRIALS * self._prior) / trials
        self._prior += (level - self._prior) / PRIOR_ROUNDS
        probability, expected = 1.0, 0.0
        for position, reached in enumerate(self._reached):
            rate = (self._accepted[position] + SHARED_TRIALS * level) / (reached + SHARED_TRIALS)
            rate = min(max(rate, MIN_RATE), MAX_RATE)
            self.rates[position] = rate
            probability *= rate
            expected += probability
            self.expected_accepted[position + 1] = expected


# How many drafts of a tree are accepted on average, from acceptance by depth and child rank.


# By drafts on the path so far, then by rank: the probability that it continues to that child.
RankRates = Sequence[Sequence[float]]


def expected_accepted(shape: DraftShape, rates: RankRates) -> float:
    """Drafts of a round that are accepted on average. rates: of `shape.depth` depths and
    `shape.topk` ranks.

    A node counts with the probability that the accepted path has it. A dynamic tree has the
    likeliest nodes, as if a draft network knew these rates and nothing else; a real one knows more
    about each token."""
    if shape.choices:
        return sum(
            prod(rates[depth][rank] for depth, rank in enumerate(path)) for path in shape.choices
        )
    if not shape.num_nodes:
        return 0.0
    expected = 0.0
    heap = [(-rates[0][0], 0, 0, 1.0)]  # minus a node's probability, depth, rank, its parent's
    for _ in range(shape.num_nodes):
        if not heap:
            break
        negative, depth, rank, parent = heappop(heap)
        expected -= negative
        if depth + 1 < shape.depth:
            heappush(heap, (negative * rates[depth + 1][0], depth + 1, 0, -negative))
        if rank + 1 < shape.topk:
            heappush(heap, (-parent * rates[depth][rank + 1], depth, rank + 1, parent))
    return expected


# How likely each further child of a node is accepted, given that those before it were not. What
# paths showed is a table of `path_ranks`; all depths share one estimate.


RANK_TRIALS = 8.0  # nodes that the prior counts for
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
            (accepted + RANK_TRIALS * prior) / (tried + RANK_TRIALS)
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


REFRESH_ROUNDS = 8  # that predictions of trees may be old: they take long
GAIN_DRAFTS = 128.0  # accepted drafts that the assumption of no gain counts for
GAIN_WINDOWS = 4.0  # memory of the gain, which changes less than acceptance does
SETTLING_TRIALS = 64  # requests in trees before predictions are compared: priors are far off
FADING_ROUNDS = 256  # memory of the gain in rounds without trees, which are then tried again
MIN_GAIN, MAX_GAIN = 0.5, 2.0
MAX_WEIGHT = 0.125  # of a round


class TierEstimate:
    """Expected accepted drafts of every tier. `rates`: acceptance by position of first children.
    `expected`: accepted drafts by tier.

    A dynamic tree adapts to each token, and paths of later children go on worse. `gain` is what
    trees had accepted over what depth and rank alone predict."""

    def __init__(
        self, shapes: DraftShapes, ladder: Sequence[int], prior: float, window: float
    ) -> None:
        self._trees = {tier: shapes.of(tier) for tier in ladder if tier in shapes.tree_tiers}
        depth = max(shapes.of(tier).depth for tier in ladder)
        self._chains = AcceptanceEstimate(depth, prior, window)
        self.rates, self.expected = self._chains.rates, self._chains.expected_accepted
        self._window, self.gain = window, 1.0
        self._age = self._num_trials = 0
        self._seen = self._predicted = 0.0
        if self._trees:
            topk = max(tree.topk for tree in self._trees.values())
            self._ranks = RankEstimate(topk, window)
            self._predict()
            self._combine()

    def observe(self, observed: ObservedRound, tier: int) -> None:
        """tier: of the drafts that were verified."""
        num_requests, num_accepted, is_tree = (
            observed.num_requests,
            observed.num_accepted,
            tier in self._trees,
        )
        if not is_tree:
            self._seen -= self._seen / FADING_ROUNDS
            self._predicted -= self._predicted / FADING_ROUNDS
        if observed.ranks:
            columns = columns_of(observed.ranks)
            self._chains.observe_counts(num_requests, chain_counts(columns))
            if is_tree:
                self._ranks.observe(num_requests, columns)
                self._compare(tier, num_accepted)
        elif not is_tree:
            self._chains.observe(num_requests, num_accepted, tier)
        if self._trees:
            self._age += 1
            if self._age % REFRESH_ROUNDS == 0:
                self._predict()
            self._combine()

    def _compare(self, tier: int, num_accepted: Sequence[int]) -> None:
        self._num_trials += len(num_accepted)
        if self._num_trials <= SETTLING_TRIALS:
            return
        keep = 1 - min(len(num_accepted) / (GAIN_WINDOWS * self._window), MAX_WEIGHT)
        self._seen = keep * self._seen + sum(num_accepted)
        self._predicted = keep * self._predicted + len(num_accepted) * self._predictions[tier]

    def _predict(self) -> None:
        shares = self._ranks.shares
        rates = [by_rank(rate, shares) for rate in self.rates]
        self._predictions = {
            tier: expected_accepted(tree, rates) for tier, tree in self._trees.items()
        }

    def _combine(self) -> None:
        gain = (self._seen + GAIN_DRAFTS) / (self._predicted + GAIN_DRAFTS)
        self.gain = min(max(gain, MIN_GAIN), MAX_GAIN)
        chains = self._chains.expected_accepted
        self.expected = chains + [0.0] * (1 + max(self._trees) - len(chains))
        for tier, predicted in self._predictions.items():
            self.expected[tier] = self.gain * predicted

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"acceptance": [round(rate, 4) for rate in self.rates]}
        if self._trees:
            found["further_children"] = [round(share, 4) for share in self._ranks.shares[1:]]
            found["tree_gain"] = round(self.gain, 4)
        return found
