"""How likely each draft of a window is accepted, given that those before it were: decayed counts, one a position.

It knows accepted lengths and nothing of time or of decisions.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from tllm_spec.adaptive_config import CostModelOptions

MIN_RATE, MAX_RATE = 0.001, 0.999  # an estimate never becomes certain


class _Excess:
    """Accepted drafts more than expected, or fewer, less a slack, as a sum that never falls below 0; and the trials
    since it was 0, by position."""

    __slots__ = ("_num_positions", "accepted", "reached", "total")

    def __init__(self, num_positions: int) -> None:
        self._num_positions = num_positions
        self.clear()

    def clear(self) -> None:
        self.total = 0.0
        self.reached, self.accepted = [0] * self._num_positions, [0] * self._num_positions

    def add(self, trials: list[int], step: float) -> float:
        """`trials`: by position, and what the last one let through. The sum with them."""
        self.total += step
        if self.total <= 0:
            self.clear()
            return 0.0
        for position, (reached, accepted) in enumerate(pairwise(trials)):
            if not reached:
                break
            self.reached[position] += reached
            self.accepted[position] += accepted
        return self.total


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
        self._excesses = (_Excess(num_positions), _Excess(num_positions))  # more than expected, and fewer
        self.expected_accepted = list(accumulate(accumulate(self.rates, mul), initial=0.0))  # by draft length

    def observe(self, num_requests: int, num_accepted: Sequence[int], num_steps: int) -> None:
        """A round of `num_steps` drafts a request; 0, or nobody drafted for: time passes and nothing is seen."""
        options = self._options
        is_seen = num_steps > 0 and len(num_accepted) > 0
        # What nobody looks at grows old as fast as what many look at.
        per_round = num_requests if is_seen else max(num_requests, options.probe_trials)
        keep = 1 - 1 / max(options.window_rounds, options.window_trials / per_round)
        floor = options.prior_weight
        self._weights = [weight if (weight := old * keep) > floor else floor for old in self._weights]
        if is_seen:
            self.learn(num_accepted, num_steps)

    def learn(self, num_accepted: Sequence[int], num_steps: int) -> None:
        """The same without any time passing."""
        reached, trials = len(num_accepted), [len(num_accepted)]
        for position in range(min(num_steps, len(self._counts))):
            if reached:
                reached -= num_accepted.count(position)
            trials.append(reached)
        self._look_for_change(trials)
        level = self._count(trials)
        self._bend(trials, level)
        self._combine(level)

    def _look_for_change(self, trials: list[int]) -> None:
        """Page's test, in both directions: trials since the excess was last 0 are of another text where it is large,
        and an estimate of this text then begins with them."""
        options, total = self._options, sum(trials)
        reached, accepted = total - trials[-1], total - trials[0]
        more = accepted - sum(map(mul, trials[:-1], self.rates))
        slack = options.change_slack * reached
        for excess, step in zip(self._excesses, (more - slack, -more - slack), strict=True):
            if (excess.total or step > 0) and excess.add(trials, step) > options.change_excess:
                self._forget(excess)
                for each in self._excesses:
                    each.clear()
                return

    def _forget(self, excess: "_Excess") -> None:
        prior = self._options.prior_weight
        for position, reached in enumerate(excess.reached):
            self._weights[position] = min(self._weights[position], prior + reached)
            accepted = excess.accepted[position]
            self._counts[position] += (accepted - reached * self._counts[position]) / (prior + reached)

    def _count(self, trials: list[int]) -> float:
        """Updates the counts of the window's positions; their level, given their shape."""
        counts, weights, shape = self._counts, self._weights, self._shape
        seen = expected = 0.0
        for position, (reached, accepted) in enumerate(pairwise(trials)):
            weights[position] = weight = weights[position] + reached
            counts[position] += (accepted - reached * counts[position]) / weight
            seen += weight * counts[position]
            expected += weight * shape[position]
        return max(MIN_RATE, seen / expected)

    def _bend(self, trials: list[int], level: float) -> None:
        """The shape of the window's positions, given their level."""
        counts, weights, shape, strength = (
            self._counts,
            self._weights,
            self._shape,
            self._options.ratio_weight,
        )
        for position, reached in enumerate(trials[:-1]):
            surprise = counts[position] / level - shape[position]
            shape[position] += surprise * reached / (strength + weights[position])

    def _combine(self, level: float) -> None:
        strength, rates, expected = self._options.ratio_weight, self.rates, self.expected_accepted
        reach, total, scaled = 1.0, 0.0, level * strength
        for position, weight in enumerate(self._weights):
            rate = (weight * self._counts[position] + scaled * self._shape[position]) / (weight + strength)
            rates[position] = rate = rate if rate < MAX_RATE else MAX_RATE
            reach *= rate
            total += reach
            expected[position + 1] = total
