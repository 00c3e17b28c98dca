"""How likely each draft of a window is accepted, given that those before it were: decayed counts,
one a position.

It knows accepted lengths and nothing of time or of decisions.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from tllm_spec.adaptive_config import CostModelOptions

MIN_RATE, MAX_RATE = 0.001, 0.999  # an estimate never becomes certain


class _Excess:
    """Accepted drafts more than expected, or fewer, less a slack, as a sum that never falls below
    0; and the trials since it was 0, by position."""

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

    Two views of a position are weighed by their evidence: its own decayed count, and a model of the
    text, level x shape, where the level moves all positions together and the shape is a position's
    ratio to it, 1 before it was ever seen. So positions beyond the window follow what happens
    inside it. Without new trials a count's weight fades down to the prior's, and its value stays:
    what was bad is not tried again only because it was long ago, but one probe then moves it far.
    """

    def __init__(self, num_positions: int, options: CostModelOptions) -> None:
        # Taken out of the options, whose attributes are slow to read (pydantic): each is needed in
        # every round.
        self._prior_weight, self._ratio_weight = options.prior_weight, options.ratio_weight
        self._window_trials, self._window_rounds = options.window_trials, options.window_rounds
        self._change_excess, self._change_slack = options.change_excess, options.change_slack
        self._probe_trials = options.probe_trials
        self._counts = [options.prior_acceptance] * num_positions
        self._weights = [options.prior_weight] * num_positions
        self._shape = [1.0] * num_positions
        self.rates = [options.prior_acceptance] * num_positions
        self._excesses = (
            _Excess(num_positions),
            _Excess(num_positions),
        )  # more than expected, and fewer
        self.expected_accepted = list(
            accumulate(accumulate(self.rates, mul), initial=0.0)
        )  # by draft length

    def observe(self, num_requests: int, num_accepted: Sequence[int], num_steps: int) -> None:
        """A round of `num_steps` drafts a request; 0, or nobody drafted for: time passes and
        nothing is seen."""
        is_seen = num_steps > 0 and len(num_accepted) > 0
        # What nobody looks at grows old as fast as what many look at.
        per_round = num_requests if is_seen else max(num_requests, self._probe_trials)
        rounds = self._window_trials / per_round
        keep = 1 - 1 / (rounds if rounds > self._window_rounds else self._window_rounds)
        weights, floor = self._weights, self._prior_weight
        for position, weight in enumerate(weights):
            if weight > floor:
                weight *= keep
                weights[position] = weight if weight > floor else floor
        if is_seen:
            self.learn(num_accepted, num_steps)

    def learn(self, num_accepted: Sequence[int], num_steps: int) -> None:
        """The same without any time passing. Where there are no positions, drafts of another batch
        size's length may be told of all the same."""
        if not self.rates:
            return
        # A list of many requests takes a microsecond for each position, bytes a tenth; a byte holds
        # 255 at most.
        lengths = bytes(num_accepted) if num_steps < 256 else num_accepted
        reached, trials, expected = len(num_accepted), [len(num_accepted)], 0.0
        for position, rate in enumerate(self.rates[:num_steps]):
            expected += reached * rate
            if reached:
                reached -= lengths.count(position)
            trials.append(reached)
        self._look_for_change(trials, expected)
        self._combine(trials, self._count(trials))

    def _look_for_change(self, trials: list[int], expected: float) -> None:
        """Page's test, in both directions: trials since the excess was last 0 are of another text
        where it is large, and an estimate of this text then begins with them. `expected`: accepted
        drafts."""
        total = sum(trials)
        more = total - trials[0] - expected
        slack = self._change_slack * (total - trials[-1])
        above, below = self._excesses
        if (more > slack or above.total) and above.add(trials, more - slack) > self._change_excess:
            self._begin_anew(above)
        elif (-more > slack or below.total) and below.add(
            trials, -more - slack
        ) > self._change_excess:
            self._begin_anew(below)

    def _begin_anew(self, excess: _Excess) -> None:
        prior = self._prior_weight
        for position, reached in enumerate(excess.reached):
            self._weights[position] = min(self._weights[position], prior + reached)
            accepted = excess.accepted[position]
            self._counts[position] += (accepted - reached * self._counts[position]) / (
                prior + reached
            )
        for each in self._excesses:
            each.clear()

    def _count(self, trials: list[int]) -> float:
        """Updates the counts of the window's positions; their level, given their shape."""
        counts, weights, shape = self._counts, self._weights, self._shape
        seen = expected = 0.0
        for position, (reached, accepted) in enumerate(pairwise(trials)):
            weights[position] = weight = weights[position] + reached
            count = counts[position]
            counts[position] = count = count + (accepted - reached * count) / weight
            seen += weight * count
            expected += weight * shape[position]
        level = seen / expected
        return level if level > MIN_RATE else MIN_RATE

    def _combine(self, trials: list[int], level: float) -> None:
        """The shape of the window's positions, given their level, and the rates of all
        positions."""
        counts, shape, rates, expected = (
            self._counts,
            self._shape,
            self.rates,
            self.expected_accepted,
        )
        strength, window = self._ratio_weight, len(trials) - 1
        reach, total, scaled = 1.0, 0.0, level * strength
        for position, weight in enumerate(self._weights):
            count, ratio, evidence = counts[position], shape[position], weight + strength
            if position < window:
                ratio += (count / level - ratio) * trials[position] / evidence
                ratio = ratio if ratio > MIN_RATE else MIN_RATE
                shape[position] = ratio
            rate = (weight * count + scaled * ratio) / evidence
            if rate > MAX_RATE:
                rate = MAX_RATE
            rates[position] = rate
            reach *= rate
            total += reach
            expected[position + 1] = total
