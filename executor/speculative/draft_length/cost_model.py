"""`strategy: cost_model`: the draft length, or tree, with the most expected tokens per second.

Expected tokens come from the acceptance estimate of the slot, seconds from the round times of the
batch size. Longer draft lengths than the current one are learned by probes: a few rounds of the
next longer length, within a small share of the time. A tree is used when it is expected to win:
chains give the evidence for it."""

from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import ceil
from typing import Any, Protocol

from tllm_spec.config.adaptive_config import CostModelOptions, SlotOptions
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.verify_budget import may_have
from tllm_spec.executor.speculative.draft_length.estimates import TierEstimate
from tllm_spec.executor.speculative.draft_length.round_times import CorrectedRoundTimes
from tllm_spec.executor.speculative.draft_length.tier_policy import (
    DecisionLog,
    ObservedRound,
    Switch,
)

PROBE_TRIALS = 8  # requests that a probe should see, over its rounds
MAX_PROBE_ROUNDS = 4  # with drafts of the probed length
SPARE_ROUNDS = 3  # of a probe: the first has no such drafts yet, and results are read late
MAX_SAVED_ROUNDS = 40.0  # of the present length: time that quiet traffic may save up for probes
SHARE_ROUNDS = 8  # memory of the share of requests that are drafted for


class Estimate(Protocol):
    """What a slot knows. `rates`: acceptance by position; `expected`: accepted drafts by tier."""

    rates: list[float]
    expected: list[float]

    def observe(self, observed: ObservedRound, tier: int) -> None:
        """tier: of the drafts that were verified."""

    def state(self) -> dict[str, Any]:
        """As plain values."""


@dataclass
class _Probe:
    tier: int
    rounds_to_see: int  # with drafts of this tier
    rounds_left: int  # of any kind


def ladder_of(options: SlotOptions, shapes: DraftShapes) -> tuple[int, ...]:
    """The tiers that a slot may choose, ascending: its draft lengths, and then trees."""
    if not isinstance(options, CostModelOptions) or options.candidate_trees is None:
        trees = list(shapes.tree_tiers)
    else:
        trees = sorted(shapes.tier_of(tree.shape) for tree in options.candidate_trees)
    return (*options.candidate_steps, *trees)


class CostModelSlot:
    """Chooses the draft length with the most expected tokens per second. Every batch size has a
    draft length of its own; acceptance is estimated from all batch sizes of the slot."""

    def __init__(
        self,
        lower_bound: int,
        options: CostModelOptions,
        log: DecisionLog,
        times: CorrectedRoundTimes,
        shapes: DraftShapes | None = None,
    ) -> None:
        """shapes: None for chains of every length."""
        self.lower_bound, self._log, self._times = lower_bound, log, times
        self._shapes = shapes or DraftShapes.chains(options.candidate_steps[-1])
        self._ladder = self._find_ladder(options)
        lengths = options.candidate_steps
        self._longer = dict(pairwise(lengths if len(lengths) > 1 else self._ladder))
        self._estimate = self._new_estimate(options)
        # Attributes of the options are slow to read (pydantic), and each is needed in every round.
        self._margin, self._probe_share = 1 + options.switch_margin, options.probe_time_share
        self._drafted_share = 1.0  # of a batch's requests: those that pause gain nothing
        self._tiers: dict[int, int] = {}  # of each batch size
        self._decided: dict[int, int] = {}  # since the last round: batch sizes and their max_tier
        self._probe: _Probe | None = None
        self._saved_seconds = 0.0  # for probes

    def _find_ladder(self, options: CostModelOptions) -> tuple[int, ...]:
        return ladder_of(options, self._shapes)

    def _longer_than(self, batch_size: int, tier: int) -> int | None:
        """What a tier may try; a single length may try a tree."""
        return self._longer.get(tier)

    def _new_estimate(self, options: CostModelOptions) -> Estimate:
        parts = options.prior_acceptance, options.window_trials
        return TierEstimate(self._shapes, self._ladder, *parts)

    def tier_for(self, batch_size: int, max_tier: int) -> int:
        if self._decided.get(batch_size) != max_tier:
            self._decide(batch_size, max_tier)
        tier, probe = self._tiers[batch_size], self._probe
        # A batch size takes part in the slot's probe if that is one of its own.
        if (
            probe is not None
            and probe.tier <= max_tier
            and probe.tier == self._longer_than(batch_size, tier)
        ):
            return probe.tier
        return tier

    def reachable(self, batch_size: int, max_tier: int) -> set[int]:
        return {tier for tier in self._ladder_at(batch_size) if tier <= max_tier} or {0}

    def _ladder_at(self, batch_size: int) -> tuple[int, ...]:
        """Those of the tiers that rounds of this batch size may have."""
        return self._ladder

    def observe(self, observed: ObservedRound) -> bool:
        num_requests, batch_size, num_accepted, verified_tier, seconds, max_tier, *_ = observed
        before = self.tier_for(batch_size, max_tier)
        tier = before if verified_tier is None else verified_tier
        if seconds is not None:
            self._times.observe(batch_size, tier, seconds)
        is_own = tier in self._ladder or tier not in self._shapes.further_tiers
        if num_requests and is_own:
            self._estimate.observe(observed, tier)
            if tier:
                share = len(num_accepted) / num_requests
                self._drafted_share += (share - self._drafted_share) / SHARE_ROUNDS
        row, chosen = self._times.row(batch_size), self._tiers[batch_size]
        if self._probe is not None and before != chosen:
            self._pay(self._probe, self._probe_seconds(row, chosen, before), tier)
        else:
            saved = self._saved_seconds + self._probe_share * row.get(chosen, 0.0)
            self._saved_seconds = min(saved, MAX_SAVED_ROUNDS * row.get(chosen, 0.0))
        self._decided.clear()
        self._decide(batch_size, max_tier)
        self._start_or_end_probe(row, batch_size, max_tier)
        return self.tier_for(batch_size, max_tier) != before

    def _decide(self, batch_size: int, max_tier: int) -> None:
        self._tiers[batch_size] = self._best(batch_size, max_tier)
        self._decided[batch_size] = max_tier

    def _best(self, batch_size: int, max_tier: int) -> int:
        allowed, present = self._ladder_at(batch_size), self._tiers.get(batch_size)
        if max_tier < allowed[-1]:
            allowed = tuple(tier for tier in allowed if tier <= max_tier)
        if not allowed:
            return self._switched(batch_size, 0, "a limit")
        row = self._times.row(batch_size)
        share, expected = self._drafted_share, self._estimate.expected
        # Tokens per second of a request, up to a common factor.
        rates = [(1 + share * expected[tier]) / row[tier] for tier in allowed]
        best_rate = max(rates)
        best = allowed[rates.index(best_rate)]
        if present is None or best == present:
            return best
        gain = "a limit"
        if present in allowed:
            rate = rates[allowed.index(present)]
            if best_rate <= rate * self._margin:
                return present
            gain = f"{best_rate / rate - 1:+.1%} tokens per second"
        return self._switched(batch_size, best, gain)

    def _switched(self, batch_size: int, tier: int, why: str) -> int:
        """Logs that the batch size changes to `tier`, which it returns."""
        present = self._tiers.get(batch_size)
        if present not in (None, tier):
            rates = " ".join(f"{rate:.2f}" for rate in self._estimate.rates)
            reason = f"{why}; acceptance given the drafts before {rates}"
            names = self._shapes.name(present), self._shapes.name(tier)
            self._log.record(Switch(self.lower_bound, batch_size, *names, reason))
        return tier

    def _pay(self, probe: _Probe, extra_seconds: float, tier: int) -> None:
        self._saved_seconds -= extra_seconds
        probe.rounds_left -= 1
        probe.rounds_to_see -= tier == probe.tier

    def _start_or_end_probe(self, row: dict[int, float], batch_size: int, max_tier: int) -> None:
        tier, probe = self._tiers[batch_size], self._probe
        if probe is not None:
            if tier >= probe.tier or not probe.rounds_left or not probe.rounds_to_see:
                self._probe = None
            return
        longer = self._longer_than(batch_size, tier)
        if longer is None or longer > max_tier:
            return
        num_rounds = min(MAX_PROBE_ROUNDS, ceil(PROBE_TRIALS / batch_size))
        seconds = self._probe_seconds(row, tier, longer)
        is_paid = self._saved_seconds >= (num_rounds + 1) * seconds
        if is_paid and self._may_win(row, tier, longer):
            self._probe = _Probe(longer, num_rounds, num_rounds + SPARE_ROUNDS)

    def _probe_seconds(self, row: dict[int, float], tier: int, longer: int) -> float:
        """What a round of a probe costs."""
        return row[longer] - row[tier]

    def _may_win(self, row: dict[int, float], tier: int, longer: int) -> bool:
        """Whether the longer length would be better if all that it adds were accepted."""
        expected = self._estimate.expected
        reach = expected[tier] - expected[tier - 1] if tier else 1.0
        at_best = 1 + expected[tier] + reach * (longer - tier)
        now = 1 + self._drafted_share * expected[tier]
        return bool(at_best / row[longer] > now / row[tier] * self._margin)

    def state(self) -> dict[str, Any]:
        return {
            "steps": {
                str(size): self._shapes.name(tier) for size, tier in sorted(self._tiers.items())
            },
            **self._estimate.state(),
            "drafted_share": round(self._drafted_share, 4),
            "probe": self._shapes.name(self._probe.tier) if self._probe else None,
        }


# Whether the requests of a round share its rows, and how many: the tier with the most expected
# tokens per second.
#
# In every round that shares its rows the device says what it expects of each tier, from the values
# of the drafts that are in the slots. Whole windows show what shorter ones would have had
# accepted. All other tiers keep the share that they had.


MAX_WEIGHT = 0.125  # of a round
MAX_PROBE_WEIGHT = 0.5  # of a round that shows a tier again
MIN_EXPECTED = 0.01  # accepted drafts of a request


class BudgetEstimate:
    """`expected`: accepted drafts of a request that is drafted for, by tier. `rates`: the accepted
    share of the shortest drafts. A round counts for a tier as all rounds since the tier was seen
    last: probes are rare."""

    def __init__(self, shapes: DraftShapes, prior: float, window: float) -> None:
        self._shapes, self._window, self._tiers = shapes, window, shapes.compared_tiers
        self.expected = [0.0] * (1 + max(self._tiers))
        # Rounds since each tier was seen. The first round counts as a probe.
        self._unseen = dict.fromkeys(self._tiers, int(window))
        for tier in self._tiers:
            self.expected[tier] = sum(prior**n for n in range(1, 1 + shapes.of(tier).depth))
        for tier in shapes.budgeted_tiers:  # all accepted: the first rounds show all tiers
            self.expected[tier] = shapes.of(tier).tokens_each - 1
        self.rates = [prior]

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


class BudgetSlot(CostModelSlot):
    """Chooses among whole windows and rounds that share their rows. Probes are of the longest
    drafts that share rows, which show what all tiers of the batch size would bring."""

    def __init__(
        self,
        lower_bound: int,
        options: CostModelOptions,
        log: DecisionLog,
        times: CorrectedRoundTimes,
        shapes: DraftShapes,
    ) -> None:
        super().__init__(lower_bound, options, log, times, shapes)
        self._ladder_at = cache(self._find_ladder_at)  # type: ignore[method-assign] # every round

    def _find_ladder_at(self, batch_size: int) -> tuple[int, ...]:
        return tuple(tier for tier in self._ladder if may_have(batch_size, self._shapes.of(tier)))

    def _find_ladder(self, options: CostModelOptions) -> tuple[int, ...]:
        return (*options.candidate_steps, *self._shapes.budgeted_tiers)

    def _longer_than(self, batch_size: int, tier: int) -> int | None:
        own, longest = self._shapes.of(tier), self._ladder_at(batch_size)[-1]
        shows_all = own.is_ragged and own.contains(self._shapes.of(longest))
        return None if shows_all else longest if tier < longest else None

    def _new_estimate(self, options: CostModelOptions) -> Estimate:
        return BudgetEstimate(self._shapes, options.prior_acceptance, options.window_trials)

    def _probe_seconds(self, row: dict[int, float], tier: int, longer: int) -> float:
        """A round of fewer rows may take less time and emit fewer tokens, which take time, too."""
        share, expected = self._drafted_share, self._estimate.expected
        tokens = (1 + share * expected[longer]) / (1 + share * expected[tier])
        return row[longer] - row[tier] * min(tokens, 1.0)

    def _may_win(self, row: dict[int, float], tier: int, longer: int) -> bool:
        """Whether the longest drafts would be better if all that have a row were accepted."""
        now = 1 + self._drafted_share * self._estimate.expected[tier]
        at_best = self._shapes.of(longer).tokens_each
        return at_best / row[longer] > now / row[tier] * self._margin
