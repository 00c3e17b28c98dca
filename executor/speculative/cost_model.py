"""`strategy: cost_model` for one batch-size slot: the draft length with the most expected tokens per second.

Expected tokens come from the slot's acceptance estimates, seconds from the round times of the present batch size. What
is not being played is learned by probes: rarely, a few rounds of the next longer length, paid from a budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from tllm_spec.adaptive_config import CostModelOptions
from tllm_spec.executor.speculative.acceptance_estimate import AcceptanceEstimate
from tllm_spec.executor.speculative.decision_log import DecisionLog, Switch
from tllm_spec.executor.speculative.draft_len_policy import ObservedRound
from tllm_spec.executor.speculative.round_times import CorrectedRoundTimes

MAX_SAVED_TIME = 40  # rounds: what probes may add at once, e.g. five rounds of nine times the length
SPARE_ROUNDS = 3  # of a probe: the first finds no drafts of its length, and what is in flight is seen late


class Tier(NamedTuple):
    """The draft length of one batch size, and what it was decided from."""

    steps: int
    version: int
    max_steps: int
    plain_loss: float = 0.0  # what drafts lose against a plain round, at best, as share of its time


@dataclass
class Probe:
    steps: int
    rounds_to_see: int  # that really had drafts of this length
    rounds_left: int  # of any kind


class ProbeBudget:
    """Earned by every round that is no probe, spent by those that are, and not saved up for ever."""

    def __init__(self, options: CostModelOptions) -> None:
        self._options = options
        self.rounds, self.seconds = 0.0, 0.0
        self._max_rounds = 2 * (options.probe_rounds + 1)

    def earn(self, seconds: float) -> None:
        if self.rounds < self._max_rounds:
            self.rounds += self._options.probe_round_share
        if self.seconds < MAX_SAVED_TIME * seconds:
            self.seconds += self._options.probe_time_share * seconds

    def spend(self, extra_seconds: float) -> None:
        self.rounds -= 1
        self.seconds -= extra_seconds


class CostModelSlot:
    """Every batch size has a draft length of its own; acceptance is estimated from all of the slot's."""

    def __init__(
        self,
        lower_bound: int,
        options: CostModelOptions,
        log: DecisionLog,
        initial_steps: int | None,
        times: CorrectedRoundTimes,
    ) -> None:
        self.lower_bound, self._options, self._log, self._times = lower_bound, options, log, times
        self._ladder = options.candidate_steps
        self._longer = dict(pairwise(self._ladder))
        self._initial_steps = initial_steps if initial_steps in self._ladder else None
        self._estimate = AcceptanceEstimate(self._ladder[-1], options)
        self._drafted_share = 1.0  # of a batch's requests: those marked as not worth drafting gain nothing
        self._version = 0  # of all that decisions are made from
        self._tiers: dict[int, Tier] = {}
        self._budget = ProbeBudget(options)
        self._probe: Probe | None = None
        self.is_watched = False  # whether `learn` tells of rounds without drafts
        self._loss = 0.0  # plain rounds' time that drafts have lost, less what they won

    def steps_for(self, batch_size: int, max_steps: int) -> int:
        """The draft length of a round. Asking changes nothing that a second question would notice."""
        tier = self._tier(batch_size, max_steps)
        return self._probe.steps if self._probe and self._is_probed(tier, max_steps) else tier

    def _is_probed(self, tier: int, max_steps: int) -> bool:
        """A batch size takes part in the slot's probe where the probe is its next longer length, and allowed."""
        return self._probe is not None and self._probe.steps == self._longer.get(tier, 0) <= max_steps

    def reachable(self, max_steps: int) -> set[int]:
        return {steps for steps in self._ladder if steps <= max_steps} or {0}

    def learn(self, num_accepted: Sequence[int], num_steps: int, num_requests: int) -> None:
        """What drafts would have brought that nobody verified. Nothing was paid for it and no time passed."""
        self._estimate.learn(num_accepted, num_steps)
        self._add_share(len(num_accepted) / num_requests)
        self._version += 1

    def _add_share(self, share: float) -> None:
        self._drafted_share += (share - self._drafted_share) / self._options.window_rounds

    def observe(self, observed: ObservedRound) -> bool:
        batch_size, max_steps = observed.batch_size, observed.max_steps
        before = self.steps_for(batch_size, max_steps)
        steps = before if observed.num_steps is None else observed.num_steps
        if observed.seconds is not None:
            self._times.observe(batch_size, steps, observed.seconds)
        if observed.num_requests:
            self._estimate.observe(observed.num_requests, observed.num_accepted, steps)
        if observed.num_requests and steps:
            self._add_share(len(observed.num_accepted) / observed.num_requests)
        self._version += 1
        self._book(batch_size, steps, before, observed.num_accepted)
        tier, loss = self._tier(batch_size, max_steps), self._tiers[batch_size].plain_loss
        if steps or loss < 0:
            self._loss = max(0.0, self._loss + loss)
        if self._probe is None:
            self._start_probe(batch_size, tier, max_steps)
        elif tier >= self._probe.steps:
            self._probe = None  # it has convinced
        return self.steps_for(batch_size, max_steps) != before

    def _tier(self, batch_size: int, max_steps: int) -> int:
        tier = self._tiers.get(batch_size)
        if tier is None or tier.version != self._version or tier.max_steps != max_steps:
            tier = self._tiers[batch_size] = self._decide(batch_size, max_steps, tier)
        return tier.steps

    def _decide(self, batch_size: int, max_steps: int, present: Tier | None) -> Tier:
        allowed = self._ladder
        if max_steps < allowed[-1]:
            allowed = tuple(steps for steps in allowed if steps <= max_steps)
        if not allowed:
            return Tier(0, self._version, max_steps)
        if self._version == 0 and self._initial_steps in allowed:
            return Tier(self._initial_steps, self._version, max_steps)
        rates = self._rates(allowed, batch_size)
        loss = 1 - max(rates[1:]) / rates[0] if not allowed[0] and len(allowed) > 1 else 0.0
        first = int(loss > 0 and self._is_hasty(allowed[1], batch_size))
        best_rate = max(rates[first:])
        best = allowed[rates.index(best_rate, first)]
        if present is None or best == present.steps:
            return Tier(best, self._version, max_steps, loss)
        steps, gain = present.steps, "a limit"
        if steps in allowed:
            rate = rates[allowed.index(steps)]
            if best_rate <= rate * (1 + self._options.switch_margin):
                return Tier(steps, self._version, max_steps, loss)
            gain = f"{best_rate / rate - 1:+.1%} tokens per second"
        self._log.record(Switch(self.lower_bound, batch_size, steps, best, f"{gain}; {self._rates_text()}"))
        return Tier(best, self._version, max_steps, loss)

    def _rates(self, lengths: tuple[int, ...], batch_size: int) -> list[float]:
        """Tokens of a request in the time of each length, up to a common factor."""
        row, share = self._times.row(batch_size), self._drafted_share
        expected = self._estimate.expected_accepted
        return [(1 + share * expected[steps]) / row[steps] for steps in lengths]

    def _is_hasty(self, shortest: int, batch_size: int) -> bool:
        """Whether it is too early for length 0: where only probes see the text without drafts, nobody stops drafting on
        the evidence of a few bad rounds, unless the shortest drafts could bring nothing even if all were right."""
        options, row = self._options, self._times.row(batch_size)
        patience = options.plain_after_loss * min(1.0, options.probe_trials / batch_size)
        return not self.is_watched and self._loss < patience and (1 + shortest) * row[0] > row[shortest]

    def _book(self, batch_size: int, steps: int, asked_for: int, num_accepted: Sequence[int]) -> None:
        """Books a round, as part of a probe or not, and ends a probe that has seen enough or takes too long."""
        row, probe, tier = self._times.row(batch_size), self._probe, self._tiers[batch_size].steps
        if probe is None or asked_for == tier:
            self._budget.earn(row.get(steps, 0.0))
        else:
            self._budget.spend(max(0.0, row[asked_for] - row.get(tier, 0.0)))
        if probe is not None:
            probe.rounds_left -= 1
            probe.rounds_to_see -= steps == probe.steps
            is_in_vain = steps == probe.steps and max(num_accepted, default=0) == tier
            if is_in_vain or not (probe.rounds_left and probe.rounds_to_see):
                self._probe = None

    def _start_probe(self, batch_size: int, tier: int, max_steps: int) -> None:
        """The next longer length, if full acceptance of what it adds would make it better, and it can be paid."""
        options, budget = self._options, self._budget
        longer = self._longer.get(tier)
        rounds_to_see = min(options.probe_rounds, ceil(options.probe_trials / batch_size))
        if longer is None or longer > max_steps or budget.rounds < rounds_to_see + 1:
            return
        row, expected, share = (
            self._times.row(batch_size),
            self._estimate.expected_accepted,
            self._drafted_share,
        )
        if budget.seconds < (rounds_to_see + 1) * (row[longer] - row[tier]):
            return
        reach = expected[tier] - expected[tier - 1] if tier else 1.0
        now = 1 + share * expected[tier]
        at_best = (
            1 + expected[tier] + reach * (longer - tier)
        )  # marked requests may have become worth it, too
        if at_best / row[longer] > now / row[tier] * (1 + options.switch_margin):
            self._probe = Probe(longer, rounds_to_see, rounds_to_see + SPARE_ROUNDS)

    def _rates_text(self) -> str:
        return "acceptance by position " + " ".join(f"{rate:.2f}" for rate in self._estimate.rates)

    def state(self) -> dict[str, Any]:
        return {
            "steps": {str(size): tier.steps for size, tier in sorted(self._tiers.items())},
            "acceptance": [round(rate, 4) for rate in self._estimate.rates],
            "drafted_share": round(self._drafted_share, 4),
            "probe": self._probe.steps if self._probe else None,
            "probe_rounds_saved_up": round(self._budget.rounds, 2),
        }
