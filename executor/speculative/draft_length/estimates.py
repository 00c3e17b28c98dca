"""Expected accepted drafts by tier: of chains from acceptance by position, of trees from acceptance
by depth and rank, of rounds that share their rows from what the device expects."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from types import MappingProxyType
from typing import Any

from tllm_spec.config.adaptive_config import CostModelOptions
from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN, DraftShape, DraftShapes
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound

MIN_RATE, MAX_RATE = 0.001, 0.999  # an estimate never becomes certain
PRIOR_TRIALS = 4.0  # drafts that the prior counts for, and that an old estimate fades to
PRIOR_ROUNDS = 64.0  # after which the prior is about what was seen, even if that is old by now
SHARED_TRIALS = 8.0  # drafts that the average of all positions counts for at each of them
MIN_ROUNDS = 8  # memory in rounds, where few rounds fill the window
UNSEEN_SHARE = 0.25  # of the window, that positions beyond the present draft length fade to
IDLE_REQUESTS = 8  # a round without drafts ages an estimate as so many requests do
MAX_WEIGHT = 0.125  # of a round

RANK_TRIALS = 8.0  # nodes that the prior of a rank counts for
FIRST_PRIOR = 0.7  # over the rank's number from 1 on, e.g. 0.35 for the second child, but
LIKELIER = 2.0  # times the first child's rate at most: a network that is never right has no second
REFRESH_ROUNDS = 8  # that predictions of trees may be old: they take long
GAIN_DRAFTS = 128.0  # accepted drafts that the assumption of no gain counts for
GAIN_WINDOWS = 4.0  # memory of the gain, which changes less than acceptance does
SETTLING_TRIALS = 64  # requests in trees before predictions are compared: priors are far off
FADING_ROUNDS = 256  # memory of what rounds do not show: of the gain those without trees
MIN_GAIN, MAX_GAIN = 0.5, 2.0
# Of copied drafts: hindsight predicts them well, but for rounds that do not draft.
COPIES_GAIN_DRAFTS, LONG_FADING_ROUNDS = 16.0, 2048

MAX_PROBE_WEIGHT = 0.5  # of a round that shows a tier that shares rows again
MIN_EXPECTED = 0.01  # accepted drafts of a request

# By drafts on the path so far, then by rank: the probability that it continues to that child.
RankRates = Sequence[Sequence[float]]
Columns = Sequence[Counter[int]]  # by depth: how often each value of `path_ranks` was seen


def ladder_of(options: CostModelOptions, shapes: DraftShapes) -> tuple[int, ...]:
    """The tiers of whole windows that a slot may choose, ascending: its draft lengths, copied
    drafts if these are no longer than its lengths, and then trees."""
    if options.candidate_trees is None:
        trees = list(shapes.tree_tiers)
    else:
        trees = sorted(shapes.tier_of(tree.shape) for tree in options.candidate_trees)
    steps, copied = options.candidate_steps, shapes.copied_tier
    if copied is None or shapes.of(copied).depth > steps[-1]:
        return (*steps, *trees)
    return (*steps, copied, *trees)


def estimate_of(options: CostModelOptions, shapes: DraftShapes, *, shares_rows: bool) -> "Estimate":
    """shares_rows: whether the slot also compares rounds that share their rows."""
    memory = options.prior_acceptance, options.window_trials
    if shares_rows:
        return BudgetEstimate(shapes, options.candidate_steps, *memory)
    ladder = ladder_of(options, shapes)
    trees = {tier: shapes.of(tier) for tier in ladder if tier in shapes.tree_tiers}
    copied = shapes.copied_tier if shapes.copied_tier in ladder else None
    return AcceptanceEstimate(ladder, *memory, trees, copied)


@dataclass
class Copies:
    """Rounds of copied drafts, and their tokens."""

    rounds: float
    tokens: float

    def add(self, rounds: float, tokens: float, most: float) -> None:
        """most: rounds that are remembered."""
        self.fade(most / self.rounds)
        self.rounds, self.tokens = self.rounds + rounds, self.tokens + tokens

    def fade(self, factor: float) -> None:
        self.rounds, self.tokens = (min(factor, 1.0) * n for n in (self.rounds, self.tokens))

    @property
    def num_accepted(self) -> float:
        """Drafts of a round."""
        return self.tokens / self.rounds - 1


class AcceptanceEstimate:
    """How likely a draft at each position of the window is accepted, given that all before it were;
    `rates`. Of trees they are those of first children.

    A round of K drafts of which n were accepted shows positions 1 to min(n + 1, K). Each position
    has a decayed count; one with little evidence follows the average of the others. The memory is
    `window` drafts per position. Without new drafts a count's weight fades and its value stays: an
    old bad estimate is not retried for its age, but one probe then moves it far.

    Trees next to chains also have `shares` `[K]`: by rank, how likely each of up to K children of a
    node is accepted, given that those before it were not; all depths share them, and that of rank 0
    means nothing. A dynamic tree adapts to each token, and paths of later children go on worse.
    `gain` is what trees had accepted over what depth and rank alone predict, and where all chains
    are copied what these had over what hindsight predicts.

    Copied drafts have tokens per round of their own (`Copies`), by tier, which begin as if they
    were the network's: so they are tried in the first rounds. Where `Hindsight` measures texts,
    a token counts as the rounds that it would have taken, and no probes of copied drafts are
    needed."""

    def __init__(
        self,
        ladder: Sequence[int],
        prior: float,
        window: float,
        trees: Mapping[int, DraftShape] = MappingProxyType({}),
        copied: int | None = None,
    ) -> None:
        """trees: those tiers of the ladder that are no draft lengths, but for `copied`, the one of
        copied drafts."""
        self.ladder, self._trees, self._copied = tuple(ladder), trees, copied
        others = [tier for tier in ladder if tier != copied]
        lengths = [tier for tier in others if tier not in trees]
        # A single length may try a tree.
        pairs = pairwise(lengths if len(lengths) > 1 else others)
        longer = {tier: (next_one,) for tier, next_one in pairs}
        next_to = () if copied is None else (copied,)
        self._probes = {tier: (*longer.get(tier, ()), *next_to) for tier in ladder}
        if copied is not None:
            # What the network's drafts would bring, only rounds that have them show.
            self._probes[copied] = tuple(others[-1:])
        number = max(trees[tier].depth if tier in trees else tier for tier in others)
        self._prior, self._window = prior, window
        self._reached, self._accepted = [0.0] * number, [0.0] * number
        self.rates = [prior] * number
        self.expected: list[float] = list(accumulate(accumulate(self.rates, mul), initial=0.0))
        self.expected += [0.0] * (1 + max(ladder) - len(self.expected))
        if copied is not None:
            self.expected[copied] = self.expected[number]
        self._copies: dict[int, Copies] = {}  # without a network, from hindsight alone
        self._rounds_left = 0  # rounds in which the latest measurement still counts
        topk = max((tree.topk for tree in trees.values()), default=0)
        self._rank_tried, self._rank_accepted = [0.0] * topk, [0.0] * topk
        self.gain, self._seen, self._predicted = 1.0, 0.0, 0.0
        self._rounds = self._num_trials = 0
        self._predict()
        self._apply_gain()

    def compared_at(self, batch_size: int) -> tuple[int, ...]:
        """Those of the ladder that rounds of this batch size may have, ascending."""
        return self.ladder

    def probes_of(self, batch_size: int, tier: int) -> tuple[int, ...]:
        """What rounds of that tier may try in turn, because it would show more than they do: the
        next longer length, and copied drafts; next to these the largest of the network's."""
        probes = self._probes.get(tier, ())
        return tuple(p for p in probes if p not in self._copies) if self._rounds_left else probes

    def at_best(self, tier: int, probed: int) -> float:
        """Tokens of a request in a round of `probed`, if all that it adds to `tier` were
        accepted."""
        if self._copied in (tier, probed):
            return float(1 + len(self.rates))
        reach = self.expected[tier] - self.expected[tier - 1] if tier else 1.0
        return 1 + self.expected[tier] + reach * (probed - tier)

    def observe(self, observed: ObservedRound, tier: int) -> None:
        """tier: of the drafts that were verified."""
        number, is_tree = observed.num_alive, tier in self._trees
        self._observe_hindsight(observed.hindsight)
        if tier == self._copied:
            drafted = len(observed.num_accepted)
            self._add_copies(tier, drafted, drafted + sum(observed.num_accepted))
            self._age(max(number, IDLE_REQUESTS), PRIOR_TRIALS)
            return
        if self._copied in self._copies:
            own = self._copies[self._copied]
            own.fade(max(1 - 1 / FADING_ROUNDS, PRIOR_TRIALS / own.rounds))
        if not (is_tree or tier in self._copies):
            keep = 1 - 1 / (FADING_ROUNDS if self._trees else LONG_FADING_ROUNDS)
            self._seen, self._predicted = keep * self._seen, keep * self._predicted
        if observed.ranks:
            columns = columns_of(observed.ranks)
            self._observe_counts(number, chain_counts(columns))
            if is_tree:
                self._observe_ranks(number, columns)
                self._compare(tier, observed.num_accepted)
        elif not is_tree:
            self.observe_lengths(number, observed.num_accepted, tier)
            if tier in self._copies:
                self._compare(tier, observed.num_accepted)
        self._rounds += 1
        if self._rounds % REFRESH_ROUNDS == 0:
            self._predict()
        self._apply_gain()

    def _observe_hindsight(self, rounds: Mapping[int, float]) -> None:
        self._rounds_left = FADING_ROUNDS if rounds else max(self._rounds_left - 1, 0)
        if not self._rounds_left and self._copied is None:
            self._copies.clear()
        for tier in rounds.keys() & set(self.ladder):
            self._add_copies(tier, rounds[tier], 1)

    def _add_copies(self, tier: int, num_rounds: float, num_tokens: float) -> None:
        """Requests without a match have had none accepted."""
        own = self._copies.setdefault(tier, Copies(1.0, 1 + self.expected[tier]))
        own.add(num_rounds, num_tokens, max(self._window / 4, MIN_ROUNDS * num_rounds))
        if tier == self._copied:
            self.expected[tier] = own.num_accepted

    def observe_lengths(
        self, num_requests: int, num_accepted: Sequence[int], draft_len: int
    ) -> None:
        """num_accepted: of every request that was drafted for, with `draft_len` drafts each."""
        if draft_len > 0 and num_accepted:
            self._observe_counts(num_requests, length_counts(num_accepted, draft_len))
        else:
            self._age(max(num_requests, IDLE_REQUESTS), PRIOR_TRIALS)

    def _observe_counts(self, num_requests: int, counts: Sequence[tuple[int, int]]) -> None:
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
            self.expected[position + 1] = expected

    def _observe_ranks(self, num_requests: int, columns: Columns) -> None:
        most, keep = len(self._rank_tried), 1 - 1 / max(self._window / num_requests, MIN_ROUNDS)
        for counts in (self._rank_tried, self._rank_accepted):
            counts[:] = [keep * count for count in counts]
        for value, number in (each for column in columns for each in column.items()):
            if value == NOTHING:
                continue
            rank = value % OFF_CHAIN
            if 0 < rank < most:
                self._rank_accepted[rank] += number
            for tried in range(1, min(rank + 1 if rank < END else rank - END, most)):
                self._rank_tried[tried] += number

    @property
    def shares(self) -> list[float]:
        counts = enumerate(zip(self._rank_accepted, self._rank_tried, strict=True), 1)
        prior = min([FIRST_PRIOR, *(LIKELIER * rate for rate in self.rates[:1])])
        return [
            (accepted + RANK_TRIALS * (prior / number)) / (tried + RANK_TRIALS)
            for number, (accepted, tried) in counts
        ]

    def _compare(self, tier: int, num_accepted: Sequence[int]) -> None:
        self._num_trials += len(num_accepted)
        own = self._copies.get(tier)
        if own is None and self._num_trials <= SETTLING_TRIALS:
            return
        keep = 1 - min(len(num_accepted) / (GAIN_WINDOWS * self._window), MAX_WEIGHT)
        self._seen = keep * self._seen + sum(num_accepted)
        predicted = self._predictions[tier] if own is None else own.num_accepted
        self._predicted = keep * self._predicted + len(num_accepted) * predicted

    def _predict(self) -> None:
        shares = self.shares
        rates = [by_rank(rate, shares) for rate in self.rates]
        self._predictions = {
            tier: expected_accepted(tree, rates) for tier, tree in self._trees.items()
        }

    def _apply_gain(self) -> None:
        gain = (self._seen + GAIN_DRAFTS) / (self._predicted + GAIN_DRAFTS)
        self.gain = min(max(gain, MIN_GAIN), MAX_GAIN)
        for tier, predicted in self._predictions.items():
            self.expected[tier] = self.gain * predicted
        gain = (self._seen + COPIES_GAIN_DRAFTS) / (self._predicted + COPIES_GAIN_DRAFTS)
        for tier, own in self._copies.items():
            if tier != self._copied:
                self.expected[tier] = min(gain, MAX_GAIN) * own.num_accepted

    def state(self) -> dict[str, Any]:
        """As plain values."""
        rates: dict[str, Any] = {"acceptance": [round(rate, 4) for rate in self.rates]}
        if self._copied is not None:
            rates["copied"] = round(self.expected[self._copied], 4)  # accepted drafts of a request
        if self._rounds_left:
            rates["hindsight"] = True
        if not self._trees:
            return rates
        shares = [round(share, 4) for share in self.shares[1:]]
        return rates | {"further_children": shares, "tree_gain": round(self.gain, 4)}


def columns_of(ranks: Sequence[Sequence[int]]) -> list[Counter[int]]:
    """ranks: by request, as `path_ranks` shows them."""
    return [Counter(column) for column in zip(*ranks, strict=True)]


def length_counts(num_accepted: Sequence[int], draft_len: int) -> list[tuple[int, int]]:
    """As `chain_counts`, of chains of which so many drafts were accepted."""
    # `bytes.count` takes a tenth of a list's time; a byte holds at most 255.
    lengths = bytes(num_accepted) if max(num_accepted) < 256 else num_accepted
    counts, reached = [], len(num_accepted)
    for position in range(draft_len):
        if not reached:
            break
        accepted = reached - lengths.count(position)
        counts.append((reached, accepted))
        reached = accepted
    return counts


def chain_counts(columns: Columns) -> list[tuple[int, int]]:
    """By depth: paths of first children that tried one more, and those whose first child was
    accepted. These are what a chain would have shown."""
    counts = []
    for column in columns:
        own = {value: number for value, number in column.items() if NOTHING < value < OFF_CHAIN}
        counts.append((sum(own.values()) - own.get(END, 0), own.get(0, 0)))
    return counts


def by_rank(first: float, shares: Sequence[float]) -> list[float]:
    """The probability of each child of a node. first: of its first. shares: by
    rank, see `AcceptanceEstimate`."""
    found, left = [first], 1 - first
    for share in shares[1:]:
        found.append(left * share)
        left *= 1 - share
    return found


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


class BudgetEstimate:
    """Rounds that share their rows next to whole windows; otherwise as `AcceptanceEstimate`.

    In every round that shares its rows the device says what it expects of each tier, from the
    values of the drafts that are in the slots. Whole windows show what shorter ones would have had
    accepted. All other tiers keep the share that they had. `rates`: the accepted share of the
    shortest drafts. A round counts for a tier as all rounds since the tier was seen last: probes
    are rare."""

    def __init__(
        self, shapes: DraftShapes, lengths: Sequence[int], prior: float, window: float
    ) -> None:
        """lengths: of whole windows that may be chosen."""
        self.ladder = (*lengths, *shapes.budgeted_tiers)
        self.compared_at = cache(self._find_compared)  # it is asked in every round
        self._shapes, self._window, self._tiers = shapes, window, shapes.compared_tiers
        self.expected = [0.0] * (1 + max(self._tiers))
        # Rounds since each tier was seen. The first round counts as a probe.
        self._unseen = dict.fromkeys(self._tiers, int(window))
        for tier in self._tiers:
            self.expected[tier] = sum(prior**n for n in range(1, 1 + shapes.of(tier).depth))
        for tier in shapes.budgeted_tiers:  # all accepted: the first rounds show all tiers
            self.expected[tier] = shapes.of(tier).tokens_each - 1
        self.rates = [prior]

    def _find_compared(self, batch_size: int) -> tuple[int, ...]:
        return tuple(tier for tier in self.ladder if self._shapes.of(tier).is_compared(batch_size))

    def probes_of(self, batch_size: int, tier: int) -> tuple[int, ...]:
        """The longest drafts, unless rounds of that tier show what all tiers would bring."""
        own, longest = self._shapes.of(tier), self.compared_at(batch_size)[-1]
        shows_all = own.is_ragged and own.contains(self._shapes.of(longest))
        return (longest,) if tier < longest and not shows_all else ()

    def at_best(self, tier: int, probed: int) -> float:
        return self._shapes.of(probed).tokens_each

    def observe(self, observed: ObservedRound, tier: int) -> None:
        number = len(observed.num_accepted)
        if not number or not tier:
            return
        weight = min(number / self._window, MAX_WEIGHT)
        if any(observed.expected):
            shown = dict(zip(self._tiers, observed.expected, strict=False))
            of = self._shapes.of
            known = [each for each in self._tiers if of(tier).contains(of(each))]
            found = [shown[each] / number for each in known]
        else:  # whole windows
            known = [each for each in self._tiers if each <= tier]
            counts = Counter(observed.num_accepted).items()
            found = [sum(min(n, depth) * times for n, times in counts) / number for depth in known]
        self._follow(known, found, weight)

    def _follow(self, known: list[int], found: list[float], weight: float) -> None:
        """Updates the `known` tiers with what was `found`. The other tiers keep their ratio to the
        last of these, and trees next to chains their ratio to the first: short chains tell more of
        a tree than long ones do."""
        if not known:
            return
        first, last, before = known[0], known[-1], list(self.expected)
        for tier, value in zip(known, found, strict=False):
            own = max(weight, min(weight * (1 + self._unseen[tier]), MAX_PROBE_WEIGHT))
            step = own * (value - self.expected[tier])
            self.expected[tier] = max(self.expected[tier] + step, MIN_EXPECTED)
            self._unseen[tier] = 0
        for tier in self._tiers:
            if tier not in known:
                is_alike = self._shapes.of(tier).topk <= self._shapes.of(last).topk
                reference = last if is_alike else first
                self.expected[tier] *= self.expected[reference] / before[reference]
                self._unseen[tier] += 1
        shortest = self._tiers[0]
        self.rates[0] = self.expected[shortest] / self._shapes.of(shortest).depth

    def state(self) -> dict[str, Any]:
        named = {str(self._shapes.name(tier)): self.expected[tier] for tier in self._tiers}
        return {"expected": {name: round(value, 4) for name, value in named.items()}}


Estimate = AcceptanceEstimate | BudgetEstimate
