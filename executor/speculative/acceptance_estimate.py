"""How likely each draft of a window is accepted, given that those before it were: decayed counts, one a position.

It knows accepted lengths and nothing of time or of decisions.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from tllm_spec.adaptive_config import CostModelOptions

MIN_RATE, MAX_RATE = 0.001, 0.999  # an estimate never becomes certain


class AcceptanceEstimate:
    """A round of K drafts of which n are accepted shows positions 1 .. min(n + 1, K).

    Two views of a position are weighed by their evidence: its own decayed count, and a model of the text, level x
    shape, where the level moves all positions together and the shape is a position's ratio to it, 1 before it was
    ever seen. So positions beyond the window follow what happens inside it.
    Without new trials a count's weight fades down to the prior's, and its value stays: what was bad is not
    tried again only because it was long ago, but one probe then moves it far.
    """

    def __init__(self, num_positions: int, options: CostModelOptions) -> None:
        self._options = options
        self._counts = [options.prior_acceptance] * num_positions
        self._weights = [options.prior_weight] * num_positions
        self._shape = [1.0] * num_positions
        self.rates = [options.prior_acceptance] * num_positions
        self.expected_accepted = list(accumulate(accumulate(self.rates, mul), initial=0.0))  # by draft length

    def observe(self, num_requests: int, num_accepted: Sequence[int], num_steps: int) -> None:
        """A round of `num_steps` drafts a request; 0, or nobody drafted for: time passes and nothing is seen."""
        options = self._options
        keep = 1 - 1 / max(options.window_rounds, options.window_trials / num_requests)
        floor = options.prior_weight
        self._weights = [weight if (weight := old * keep) > floor else floor for old in self._weights]
        if num_steps and num_accepted:
            self._combine(self._learn(self._count(num_accepted, num_steps)))

    def _count(self, num_accepted: Sequence[int], num_steps: int) -> list[int]:
        """Updates the counts of the window's positions; how many trials each had."""
        counts, weights = self._counts, self._weights
        reached, trials = len(num_accepted), []
        for position in range(min(num_steps, len(counts))):
            trials.append(reached)
            accepted = reached - num_accepted.count(position)
            weights[position] += reached
            counts[position] += (accepted - reached * counts[position]) / weights[position]
            reached = accepted
        return trials

    def _learn(self, trials: list[int]) -> float:
        """The level of the window's positions, given their shape; then their shape, given the level."""
        counts, weights, shape, strength = (
            self._counts,
            self._weights,
            self._shape,
            self._options.ratio_weight,
        )
        level = sum(map(mul, weights, counts[: len(trials)])) / sum(map(mul, weights, shape[: len(trials)]))
        level = float(max(MIN_RATE, level))
        for position, reached in enumerate(trials):
            surprise = counts[position] / level - shape[position]
            shape[position] += surprise * reached / (strength + weights[position])
        return level

    def _combine(self, level: float) -> None:
        strength, rates, expected = self._options.ratio_weight, self.rates, self.expected_accepted
        reach, total, scaled = 1.0, 0.0, level * strength
        for position, weight in enumerate(self._weights):
            rate = (weight * self._counts[position] + scaled * self._shape[position]) / (weight + strength)
            rates[position] = rate = rate if rate < MAX_RATE else MAX_RATE
            reach *= rate
            total += reach
            expected[position + 1] = total
