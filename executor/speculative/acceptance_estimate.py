"""How likely each draft of a window is accepted, given that those before it were: decayed counts, one a position.

It knows accepted lengths and nothing of time or of decisions.
"""

from collections.abc import Sequence
from operator import mul

from tllm_spec.adaptive_config import CostModelOptions

MIN_RATE, MAX_RATE = 0.001, 0.999  # an estimate never becomes certain, so ratios stay finite


class AcceptanceEstimate:
    """A round of K drafts of which n are accepted shows positions 1 .. min(n + 1, K).

    A position's weight is the trials that it remembers. Without new trials the weight fades down to the prior's,
    and the estimate stays: what was bad is not tried again only because it was long ago, but one probe then moves
    the estimate far. A position beyond the window is the level of those within it, times the ratio to that level that
    it used to have (1 before it was ever seen), so that it moves with what is seen.
    """

    def __init__(self, num_positions: int, options: CostModelOptions) -> None:
        self._options = options
        self.rates = [options.prior_acceptance] * num_positions
        self._weights = [options.prior_weight] * num_positions
        self._ratios = [1.0] * num_positions

    def observe(self, num_requests: int, num_accepted: Sequence[int], num_steps: int) -> None:
        """A round of `num_steps` drafts a request; 0, or nobody drafted for: time passes and nothing is seen."""
        options = self._options
        keep = 1 - 1 / max(options.window_rounds, options.window_trials / num_requests)
        floor = options.prior_weight
        self._weights = [weight if (weight := old * keep) > floor else floor for old in self._weights]
        if num_steps and num_accepted:
            trials = self._count(num_accepted, num_steps)
            self._extrapolate(trials)

    def _count(self, num_accepted: Sequence[int], num_steps: int) -> list[int]:
        """Updates the positions of the window; how many trials each had."""
        rates, weights = self.rates, self._weights
        reached, trials = len(num_accepted), []
        for position in range(min(num_steps, len(rates))):
            trials.append(reached)
            accepted = reached - num_accepted.count(position)
            weight = weights[position] = weights[position] + reached
            rate = rates[position] + (accepted - reached * rates[position]) / weight
            rates[position] = MIN_RATE if rate < MIN_RATE else MAX_RATE if rate > MAX_RATE else rate
            reached = accepted
        return trials

    def _extrapolate(self, trials: list[int]) -> None:
        """Moves the positions beyond the window with the level of those within it, and learns the latters' ratios."""
        rates, weights, ratios = self.rates, self._weights, self._ratios
        ratio_weight = self._options.ratio_weight
        num_seen = len(trials)
        level = sum(map(mul, rates, weights[:num_seen])) / sum(weights[:num_seen])
        for position, reached in enumerate(trials):
            surprise = rates[position] / level - ratios[position]
            ratios[position] += surprise * reached / (ratio_weight + weights[position])
        for position in range(num_seen, len(rates)):
            rates[position] = min(max(level * ratios[position], MIN_RATE), MAX_RATE)

    def expected_accepted(self) -> list[float]:
        """Entry K: how many drafts of a window of K are accepted on average."""
        sums, reach = [0.0], 1.0
        for rate in self.rates:
            reach *= rate
            sums.append(sums[-1] + reach)
        return sums
