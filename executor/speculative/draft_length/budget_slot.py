"""How many rows the requests of a round share: the tier with the most expected tokens per second.

In every such round the device says what it expects of each tier, from the values of the drafts that
are in the slots. Tiers with longer drafts than these keep the share that they had."""

from typing import Any

from tllm_spec.config.adaptive_config import CostModelOptions
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.speculative.draft_length.cost_model import CostModelSlot, Estimate
from tllm_spec.executor.speculative.draft_length.tier_policy import ObservedRound

MAX_WEIGHT = 0.125  # of a round
MAX_PROBE_WEIGHT = 0.5  # of a round that shows a tier again
MIN_EXPECTED = 0.01  # accepted drafts of a request


class BudgetEstimate:
    """`expected`: accepted drafts of a request that is drafted for, by tier. `rates`: of verified
    drafts those that were accepted. A round counts for a tier as all rounds since the tier was seen
    last: probes are rare."""

    def __init__(self, shapes: DraftShapes, prior: float, window: float) -> None:
        self._shapes, self._window = shapes, window
        self._tiers = [1, *shapes.budgeted_tiers]  # ascending by depth
        self.expected = [0.0] * (1 + max(self._tiers))
        self._unseen = dict.fromkeys(self._tiers, 0)  # rounds since each tier was seen
        for tier in self._tiers:  # all accepted, so that the first rounds show many tiers
            self.expected[tier] = shapes.of(tier).rows_each - 1
        self.rates = [prior]

    def observe(self, observed: ObservedRound, tier: int) -> None:
        number = len(observed.num_accepted)
        if not number or not tier:
            return
        weight = min(number / self._window, MAX_WEIGHT)
        found = [each / number for each in observed.expected]
        if not any(found):  # whole windows: what was accepted is known of one tier only
            found = [sum(observed.num_accepted) / number]
            self._follow([tier] if tier in self._tiers else [], found, weight)
            return
        depth = self._shapes.of(tier).depth
        known = [each for each in self._tiers if self._shapes.of(each).depth <= depth]
        self._follow(known, found, weight)

    def _follow(self, known: list[int], found: list[float], weight: float) -> None:
        """The tiers whose outcome is known; the others keep their share of the last of these."""
        if not known:
            return
        before = self.expected[known[-1]]
        for tier, value in zip(known, found, strict=False):
            own = max(weight, min(weight * (1 + self._unseen[tier]), MAX_PROBE_WEIGHT))
            step = own * (value - self.expected[tier])
            self.expected[tier] = max(self.expected[tier] + step, MIN_EXPECTED)
            self._unseen[tier] = 0
        ratio = self.expected[known[-1]] / before
        for tier in self._tiers:
            if tier not in known:
                self.expected[tier] *= ratio
                self._unseen[tier] += 1

    def state(self) -> dict[str, Any]:
        named = {str(self._shapes.name(tier)): self.expected[tier] for tier in self._tiers}
        return {"expected": {name: round(value, 4) for name, value in named.items()}}


class BudgetSlot(CostModelSlot):
    """Chooses among no drafts, one draft each, and rounds that share their rows. Probes are of the
    longest drafts, which show what all tiers would bring."""

    def _find_ladder(self, options: CostModelOptions) -> tuple[int, ...]:
        return (*(n for n in options.candidate_steps if n < 2), *self._shapes.budgeted_tiers)

    def _find_longer(self, options: CostModelOptions) -> dict[int, int]:
        *others, longest = self._ladder
        return dict.fromkeys(others, longest)

    def _new_estimate(self, options: CostModelOptions) -> Estimate:
        return BudgetEstimate(self._shapes, options.prior_acceptance, options.window_trials)

    def _may_win(self, row: dict[int, float], tier: int, longer: int) -> bool:
        """Whether the longest drafts would be better if all that have a row were accepted."""
        now = 1 + self._drafted_share * self._estimate.expected[tier]
        at_best = self._shapes.of(longer).rows_each
        return at_best / row[longer] > now / row[tier] * self._margin
