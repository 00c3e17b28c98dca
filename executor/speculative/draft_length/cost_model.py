"""`strategy: cost_model` for one batch-size slot: the draft length with the most expected tokens
per second.

Expected tokens come from the slot's acceptance estimates, seconds from the round times of the
present batch size. What
is not being played is learned by probes: rarely, a few rounds of the next longer length, paid from
a budget."""

from collections.abc import Sequence
from itertools import pairwise
from math import ceil
from typing import Any

from tllm_spec.adaptive_config import CostModelOptions
from tllm_spec.executor.speculative.draft_length.acceptance_estimate import AcceptanceEstimate
from tllm_spec.executor.speculative.draft_length.decision_log import DecisionLog, Switch
from tllm_spec.executor.speculative.draft_length.draft_account import DraftAccount
from tllm_spec.executor.speculative.draft_length.draft_len_policy import ObservedRound
from tllm_spec.executor.speculative.draft_length.probing import Probe, Prober
from tllm_spec.executor.speculative.draft_length.round_times import CorrectedRoundTimes


class CostModelSlot:
    """Every batch size has a draft length of its own; acceptance is estimated from all of the
    slot's. `sampled`: of rounds in which not all requests are greedy."""

    def __init__(
        self,
        lower_bound: int,
        options: CostModelOptions,
        log: DecisionLog,
        initial_steps: int | None,
        times: CorrectedRoundTimes,
        *,
        sampled: bool = False,
    ) -> None:
        self.lower_bound, self._options, self._log, self._times = lower_bound, options, log, times
        self._sampled = sampled
        self._ladder = options.candidate_steps
        self._longer = dict(pairwise(self._ladder))
        self._initial_steps = initial_steps if initial_steps in self._ladder else None
        self._estimate = AcceptanceEstimate(self._ladder[-1], options)
        self._drafted_share = (
            1.0  # of a batch's requests: those marked as not worth drafting gain nothing
        )
        self._is_new = True  # nothing was seen or learned yet
        self._tiers: dict[int, int] = {}  # the draft length of each batch size
        self._decided: dict[
            int, int
        ] = {}  # batch sizes decided since the last news: under which limit
        self._prober = Prober(options)
        # Taken out of the options, whose attributes are slow to read (pydantic): each is needed in
        # every round.
        self._window_rounds, self._margin = options.window_rounds, 1 + options.switch_margin
        self.is_watched = False  # whether `learn` tells of rounds without drafts
        self._account = DraftAccount(options)

    def steps_for(self, batch_size: int, max_steps: int) -> int:
        """The draft length of a round. Asking changes nothing that a second question would
        notice."""
        if self._decided.get(batch_size) != max_steps:
            self._decide(batch_size, max_steps)
        tier, probe = self._tiers[batch_size], self._prober.probe
        # A batch size takes part in the slot's probe where that is its next longer length, and
        # allowed.
        if probe is not None and probe.steps == self._longer.get(tier, 0) <= max_steps:
            return probe.steps
        return tier

    def reachable(self, max_steps: int) -> set[int]:
        return {steps for steps in self._ladder if steps <= max_steps} or {0}

    def learn(self, num_accepted: Sequence[int], num_steps: int, num_requests: int) -> None:
        """What drafts would have brought that nobody verified. Nothing was paid for it and no time
        passed."""
        self._estimate.learn(num_accepted, num_steps)
        self._add_share(len(num_accepted) / num_requests)
        self._hear_news()

    def _hear_news(self) -> None:
        self._is_new = False
        self._decided.clear()

    def _add_share(self, share: float) -> None:
        self._drafted_share += (share - self._drafted_share) / self._window_rounds

    def observe(self, observed: ObservedRound) -> bool:
        num_requests, batch_size, num_accepted, num_steps, seconds, max_steps, _, return_seconds = (
            observed
        )
        before = self.steps_for(batch_size, max_steps)
        steps = before if num_steps is None else num_steps
        if seconds is not None:
            self._times.observe(batch_size, steps, seconds, self._sampled)
        if num_requests:
            self._estimate.observe(num_requests, num_accepted, steps)
        row = self._times.row(batch_size, self._sampled)
        if num_requests and steps:
            self._add_share(len(num_accepted) / num_requests)
            if not self._ladder[0] and steps in row:  # not a limit's length, which has no time
                self._account.book(num_accepted, num_requests, row[steps] / row[0])
        self._hear_news()
        tier, probe = self._tiers[batch_size], self._prober.probe
        if probe is None or before == tier:
            self._prober.earn(row.get(steps, 0.0), steps)
        else:
            if return_seconds is not None:
                beyond = self._times.beyond(batch_size, before, return_seconds, self._sampled)
                self._prober.pay(beyond * row[before], row[tier])
            self._book(probe, row, tier, steps, num_accepted)
        self._decide(batch_size, max_steps)
        tier, probe = self._tiers[batch_size], self._prober.probe
        if probe is None:
            self._start_probe(row, batch_size, tier, max_steps)
        elif tier >= probe.steps:
            self._prober.probe = None  # it has convinced
        return self.steps_for(batch_size, max_steps) != before

    def _decide(self, batch_size: int, max_steps: int) -> None:
        self._tiers[batch_size] = self._best(batch_size, max_steps)
        self._decided[batch_size] = max_steps

    def _best(self, batch_size: int, max_steps: int) -> int:
        allowed, present = self._ladder, self._tiers.get(batch_size)
        if max_steps < allowed[-1]:
            allowed = tuple(steps for steps in allowed if steps <= max_steps)
        if not allowed:
            return 0
        if self._is_new and self._initial_steps in allowed:
            return self._initial_steps
        row = self._times.row(batch_size, self._sampled)
        share, expected = self._drafted_share, self._estimate.expected_accepted
        # Tokens of a request in the time of each length, up to a common factor.
        rates = [(1 + share * expected[steps]) / row[steps] for steps in allowed]
        best_rate = max(rates)
        place = rates.index(best_rate)
        if place == 0 and self._is_too_early_for_none(row, allowed):
            best_rate = max(rates[1:])
            place = rates.index(best_rate, 1)
        best = allowed[place]
        if present is None or best == present:
            return best
        gain = "a limit"
        if present in allowed:
            rate = rates[allowed.index(present)]
            if best_rate <= rate * self._margin:
                return present
            gain = f"{best_rate / rate - 1:+.1%} tokens per second"
        self._prober.forget_pauses()
        reason = f"{gain}; {self._rates_text()}"
        self._log.record(Switch(self.lower_bound, batch_size, present, best, reason, self._sampled))
        return best

    def _is_too_early_for_none(self, row: dict[int, float], allowed: tuple[int, ...]) -> bool:
        """Without drafts only probes see the text, so nobody stops drafting before drafts have lost
        what they may, unless the shortest could bring nothing even if all were right."""
        if self.is_watched or allowed[0] or len(allowed) < 2 or self._account.is_used_up:
            return False
        return (1 + allowed[1]) * row[0] > row[allowed[1]]

    def _book(
        self,
        probe: Probe,
        row: dict[int, float],
        tier: int,
        steps: int,
        num_accepted: Sequence[int],
    ) -> None:
        """A round of a probe, with drafts of `steps`."""
        extra = row[probe.steps] / row[tier] - 1
        beyond = sum(number - tier for number in num_accepted if number > tier) / max(
            1, len(num_accepted)
        )
        gain = (
            self._drafted_share * (beyond - extra * self._estimate.expected_accepted[tier]) - extra
        )
        is_in_vain = max(num_accepted, default=0) == tier
        self._prober.book(
            probe, steps == probe.steps, gain, max(0.0, extra * row[tier]), is_in_vain
        )

    def _start_probe(
        self, row: dict[int, float], batch_size: int, tier: int, max_steps: int
    ) -> None:
        """The next longer length, if full acceptance of what it adds would make it better, and it
        can be paid."""
        longer = self._longer.get(tier)
        if (
            longer is None
            or longer > max_steps
            or not self._prober.can_start(row[longer] - row[tier])
        ):
            return
        expected = self._estimate.expected_accepted
        reach = expected[tier] - expected[tier - 1] if tier else 1.0
        now = 1 + self._drafted_share * expected[tier]
        # Marked requests may have become worth it, too.
        at_best = 1 + expected[tier] + reach * (longer - tier)
        if at_best / row[longer] > now / row[tier] * self._margin:
            options = self._options
            self._prober.start(
                longer, min(options.probe_rounds, ceil(options.probe_trials / batch_size))
            )

    def _rates_text(self) -> str:
        return "acceptance by position " + " ".join(f"{rate:.2f}" for rate in self._estimate.rates)

    def state(self) -> dict[str, Any]:
        return {
            "steps": {str(size): steps for size, steps in sorted(self._tiers.items())},
            "acceptance": [round(rate, 4) for rate in self._estimate.rates],
            "drafted_share": round(self._drafted_share, 4),
            "probe": self._prober.probe.steps if self._prober.probe else None,
            "probe_rounds_saved_up": round(self._prober.rounds, 2),
        }
