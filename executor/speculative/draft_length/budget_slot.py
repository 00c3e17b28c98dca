"""Whether the requests of a round share its rows, and how many: the tier with the most expected
tokens per second.

In every round that shares its rows the device says what it expects of each tier, from the values of
the drafts that are in the slots. Whole windows show what shorter ones would have had accepted. All
other tiers keep the share that they had."""

from collections import Counter
from functools import cache
from typing import Any

from tllm_spec.config.adaptive_config import CostModelOptions
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.config.verify_budget import may_have
from tllm_spec.executor.speculative.draft_length.cost_model import CostModelSlot, Estimate
from tllm_spec.executor.speculative.draft_length.decision_log import DecisionLog
from tllm_spec.executor.speculative.draft_length.round_times import CorrectedRoundTimes
from tllm_spec.executor.speculative.draft_length.tier_policy import ObservedRound

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
