"""`strategy: cost_model` for one batch-size slot: the draft length with the most expected tokens per second.

Expected tokens come from the slot's acceptance estimates, seconds from the round times of the present batch size. What
is not being played is learned by probes: rarely, a few rounds of the next longer length, paid from a budget.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from tllm_spec.adaptive_config import CostModelOptions
from tllm_spec.executor.speculative.acceptance_estimate import AcceptanceEstimate
from tllm_spec.executor.speculative.decision_log import DecisionLog, Switch
from tllm_spec.executor.speculative.draft_account import DraftAccount
from tllm_spec.executor.speculative.draft_len_policy import ObservedRound
from tllm_spec.executor.speculative.probing import Prober
from tllm_spec.executor.speculative.round_times import CorrectedRoundTimes


class Tier(NamedTuple):
    """The draft length of one batch size, and what it was decided from."""

    steps: int
    version: int
    max_steps: int


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
        self._prober = Prober(options)
        self.is_watched = False  # whether `learn` tells of rounds without drafts
        self._account = DraftAccount(options)

    def steps_for(self, batch_size: int, max_steps: int) -> int:
        """The draft length of a round. Asking changes nothing that a second question would notice."""
        tier = self._tier(batch_size, max_steps)
        probe = self._prober.probe
        # A batch size takes part in the slot's probe where that is its next longer length, and allowed.
        return probe.steps if probe and probe.steps == self._longer.get(tier, 0) <= max_steps else tier

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
            row = self._times.row(batch_size)
            if not self._ladder[0] and steps in row:  # not a limit's length, which has no time
                self._account.book(observed.num_accepted, observed.num_requests, row[steps] / row[0])
        self._version += 1
        self._book(batch_size, steps, before, observed.num_accepted)
        tier, probe = self._tier(batch_size, max_steps), self._prober.probe
        if probe is None:
            self._start_probe(batch_size, tier, max_steps)
        elif tier >= probe.steps:
            self._prober.probe = None  # it has convinced
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
        first = int(self._is_too_early_for_none(allowed, batch_size))
        best_rate = max(rates[first:])
        best = allowed[rates.index(best_rate, first)]
        if present is None or best == present.steps:
            return Tier(best, self._version, max_steps)
        steps, gain = present.steps, "a limit"
        if steps in allowed:
            rate = rates[allowed.index(steps)]
            if best_rate <= rate * (1 + self._options.switch_margin):
                return Tier(steps, self._version, max_steps)
            gain = f"{best_rate / rate - 1:+.1%} tokens per second"
        self._prober.forget_pauses()
        self._log.record(Switch(self.lower_bound, batch_size, steps, best, f"{gain}; {self._rates_text()}"))
        return Tier(best, self._version, max_steps)

    def _rates(self, lengths: tuple[int, ...], batch_size: int) -> list[float]:
        """Tokens of a request in the time of each length, up to a common factor."""
        row, share = self._times.row(batch_size), self._drafted_share
        expected = self._estimate.expected_accepted
        return [(1 + share * expected[steps]) / row[steps] for steps in lengths]

    def _is_too_early_for_none(self, allowed: tuple[int, ...], batch_size: int) -> bool:
        """Without drafts only probes see the text, so nobody stops drafting before drafts have lost what they may,
        unless the shortest could bring nothing even if all were right."""
        if self.is_watched or allowed[0] or len(allowed) < 2 or self._account.is_used_up:
            return False
        row = self._times.row(batch_size)
        return (1 + allowed[1]) * row[0] > row[allowed[1]]

    def _book(self, batch_size: int, steps: int, asked_for: int, num_accepted: Sequence[int]) -> None:
        """A round with drafts of `steps`, for which `asked_for` were asked for, as part of a probe or not."""
        row, probe, tier = self._times.row(batch_size), self._prober.probe, self._tiers[batch_size].steps
        if probe is None or asked_for == tier:
            self._prober.earn(row.get(steps, 0.0))
            return
        extra = row[probe.steps] / row[tier] - 1
        beyond = sum(number - tier for number in num_accepted if number > tier) / max(1, len(num_accepted))
        gain = self._drafted_share * (beyond - extra * self._estimate.expected_accepted[tier]) - extra
        is_in_vain = max(num_accepted, default=0) == tier
        self._prober.book(probe, steps == probe.steps, gain, max(0.0, extra * row[tier]), is_in_vain)

    def _start_probe(self, batch_size: int, tier: int, max_steps: int) -> None:
        """The next longer length, if full acceptance of what it adds would make it better, and it can be paid."""
        options, longer = self._options, self._longer.get(tier)
        if longer is None or longer > max_steps or not self._prober.is_ready:
            return
        row, expected = self._times.row(batch_size), self._estimate.expected_accepted
        if not self._prober.can_pay(row[longer] - row[tier]):
            return
        reach = expected[tier] - expected[tier - 1] if tier else 1.0
        now = 1 + self._drafted_share * expected[tier]
        # Marked requests may have become worth it, too.
        at_best = 1 + expected[tier] + reach * (longer - tier)
        if at_best / row[longer] > now / row[tier] * (1 + options.switch_margin):
            self._prober.start(longer, min(options.probe_rounds, ceil(options.probe_trials / batch_size)))

    def _rates_text(self) -> str:
        return "acceptance by position " + " ".join(f"{rate:.2f}" for rate in self._estimate.rates)

    def state(self) -> dict[str, Any]:
        return {
            "steps": {str(size): tier.steps for size, tier in sorted(self._tiers.items())},
            "acceptance": [round(rate, 4) for rate in self._estimate.rates],
            "drafted_share": round(self._drafted_share, 4),
            "probe": self._prober.probe.steps if self._prober.probe else None,
            "probe_rounds_saved_up": round(self._prober.rounds, 2),
        }
