"""`strategy: cost_model`: the draft length, or tree, with the most expected tokens per second.

Expected tokens come from the slot's estimate, seconds from the round times of the batch size. What
rounds do not show by themselves is learned by probes: a few rounds of another tier, within a small
share of the time. For chains that is the next longer length, and copied drafts in turn. Without
drafts, probes that change nothing become rarer. A tree is used when it is expected to win: chains
give the evidence for it."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from tllm_spec.config.adaptive_config import CostModelOptions
from tllm_spec.config.draft_shape import DraftShapes
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound
from tllm_spec.executor.speculative.draft_length.estimates import Estimate
from tllm_spec.executor.speculative.draft_length.round_times import CorrectedRoundTimes

PROBE_TRIALS = 8  # requests that a probe should see, over its rounds
MAX_PROBE_ROUNDS = 4  # with drafts of the probed length
SPARE_ROUNDS = 3  # of a probe: the first has no such drafts yet, and results are read late
MAX_SAVED_ROUNDS = 40.0  # of the present length: time that quiet traffic may save up for probes
MIN_DRAFTING = 32  # rounds with drafts that were no mere trial
MAX_PROBE_WAIT = 4.0  # times as rare, where rounds have no drafts and probes change nothing
# Relative gain that drafts must promise besides the margin, for each trial in vain, and at most.
DOUBT, MAX_DOUBT = 0.02, 0.08
SHARE_ROUNDS = 8  # memory of the share of requests that are drafted for


@dataclass
class _Probe:
    tier: int
    rounds_to_see: int  # with drafts of this tier
    rounds_left: int  # of any kind


class CostModelSlot:
    """Chooses the tier with the most expected tokens per second. Every batch size has a tier of its
    own; the estimate is of all batch sizes of the slot."""

    def __init__(
        self,
        lower_bound: int,
        estimate: Estimate,
        options: CostModelOptions,
        times: CorrectedRoundTimes,
        shapes: DraftShapes,
        record: Callable[..., None],
    ) -> None:
        self.lower_bound, self._estimate, self._times = lower_bound, estimate, times
        self._shapes, self._record = shapes, record
        # Attributes of the options are slow to read (pydantic), and each is needed in every round.
        self._margin, self._probe_share = 1 + options.switch_margin, options.probe_time_share
        self._drafted_share = 1.0  # of a batch's requests: those that pause gain nothing
        self._tiers: dict[int, int] = {}  # of each batch size
        self._decided: dict[int, int] = {}  # since the last round: batch sizes and their max_tier
        self._probe: _Probe | None = None
        self._saved_seconds = 0.0  # for probes
        self._wait = 1.0  # times as rare as the options say
        self._num_drafting = 0  # rounds since drafts were chosen
        self._doubt = 0.0  # after trials of drafts that were given up soon
        self._num_probes = 0  # so that what may be probed takes turns
        # Before any drafts were made, a probe comes at once and is paid for afterwards.
        self._has_drafted = False

    def tier_for(self, batch_size: int, max_tier: int) -> int:
        """The tier, at most `max_tier`; 0 = plain decoding. Asking changes no later answer."""
        if self._decided.get(batch_size) != max_tier:
            self._decide(batch_size, max_tier)
        tier, probe = self._tiers[batch_size], self._probe
        # A batch size takes part in the slot's probe if that is one of its own.
        if (
            probe is not None
            and probe.tier <= max_tier
            and probe.tier in self._estimate.probes_of(batch_size, tier)
        ):
            return probe.tier
        return tier

    def reachable(self, batch_size: int, max_tier: int) -> set[int]:
        """All that `tier_for` may ever answer."""
        return {tier for tier in self._estimate.compared_at(batch_size) if tier <= max_tier} or {0}

    def observe(self, observed: ObservedRound, batch_size: int, max_tier: int) -> bool:
        """Whether the tier for this batch size changed."""
        before = self.tier_for(batch_size, max_tier)
        tier = before if observed.verified_tier is None else observed.verified_tier
        if observed.seconds is not None:
            self._times.observe(batch_size, tier, observed.seconds)
        is_own = tier in self._estimate.ladder or tier not in self._shapes.further_tiers
        if observed.num_alive and is_own and not observed.is_cut:
            self._estimate.observe(observed, tier)
            if tier:
                self._has_drafted = True
                share = len(observed.num_accepted) / observed.num_alive
                self._drafted_share += (share - self._drafted_share) / SHARE_ROUNDS
        row, chosen = self._times.row(batch_size), self._tiers[batch_size]
        if (probe := self._probe) is not None:
            probe.rounds_left -= 1  # also where its batch size has moved on to another tier
        if probe is not None and before != chosen:
            self._saved_seconds -= self._probe_seconds(row, chosen, before)
            probe.rounds_to_see -= tier == probe.tier
        else:
            share = self._probe_share if chosen else self._probe_share / self._wait
            saved = self._saved_seconds + share * row.get(chosen, 0.0)
            self._saved_seconds = min(saved, MAX_SAVED_ROUNDS * row.get(chosen, 0.0))
        self._num_drafting = self._num_drafting + 1 if chosen else 0
        self._decided.clear()
        self._decide(batch_size, max_tier)
        self._start_or_end_probe(row, batch_size, max_tier)
        return self.tier_for(batch_size, max_tier) != before

    def _decide(self, batch_size: int, max_tier: int) -> None:
        self._tiers[batch_size] = self._best(batch_size, max_tier)
        self._decided[batch_size] = max_tier

    def _best(self, batch_size: int, max_tier: int) -> int:
        allowed, present = self._estimate.compared_at(batch_size), self._tiers.get(batch_size)
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
            if best_rate <= rate * (self._margin + (0.0 if present else self._doubt)):
                return present
            gain = f"{best_rate / rate - 1:+.1%} tokens per second"
        return self._switched(batch_size, best, gain)

    def _switched(self, batch_size: int, tier: int, why: str) -> int:
        """Logs that the batch size changes to `tier`, which it returns."""
        present = self._tiers.get(batch_size)
        if present not in (None, tier):
            if not tier:  # drafts that were tried for a short time are a probe, too
                is_in_vain = self._num_drafting < MIN_DRAFTING
                self._end_trial(is_in_vain=is_in_vain)
                self._doubt = min(self._doubt + DOUBT, MAX_DOUBT) if is_in_vain else 0.0
            rates = " ".join(f"{rate:.2f}" for rate in self._estimate.rates)
            reason = f"{why}; acceptance given the drafts before {rates}"
            names = self._shapes.name(present), self._shapes.name(tier)
            self._record(self.lower_bound, batch_size, *names, reason)
        return tier

    def _start_or_end_probe(self, row: dict[int, float], batch_size: int, max_tier: int) -> None:
        tier, probe = self._tiers[batch_size], self._probe
        probes = self._estimate.probes_of(batch_size, tier)
        if probe is not None:
            is_reached = tier >= probe.tier and probe.tier not in probes
            if is_reached or not probe.rounds_left or not probe.rounds_to_see:
                self._probe = None
                if not is_reached:
                    self._end_trial(is_in_vain=True)
            return
        probes = tuple(p for p in probes if p <= max_tier and self._may_win(row, tier, p))
        if not probes:
            return
        probed = probes[self._num_probes % len(probes)]
        num_rounds = min(MAX_PROBE_ROUNDS, ceil(PROBE_TRIALS / batch_size))
        seconds = self._probe_seconds(row, tier, probed)
        is_first = not (tier or self._has_drafted) and self._probe_share > 0
        is_paid = self._saved_seconds >= (num_rounds + 1) * seconds
        if is_first or is_paid:
            self._has_drafted, self._num_probes = True, self._num_probes + 1
            self._probe = _Probe(probed, num_rounds, num_rounds + SPARE_ROUNDS)

    def _end_trial(self, *, is_in_vain: bool) -> None:
        self._wait = min(2 * self._wait, MAX_PROBE_WAIT) if is_in_vain else 1.0

    def _probe_seconds(self, row: dict[int, float], tier: int, probed: int) -> float:
        """What a round of a probe costs. One with fewer rows may take less time and emit fewer
        tokens, which take time, too."""
        share, expected = self._drafted_share, self._estimate.expected
        tokens = (1 + share * expected[probed]) / (1 + share * expected[tier])
        return row[probed] - row[tier] * min(tokens, 1.0)

    def _may_win(self, row: dict[int, float], tier: int, probed: int) -> bool:
        """Whether the probed tier would be better if all that it adds were accepted."""
        now = 1 + self._drafted_share * self._estimate.expected[tier]
        at_best = self._estimate.at_best(tier, probed)
        return at_best / row[probed] > now / row[tier] * self._margin

    def state(self) -> dict[str, Any]:
        return {
            "steps": {
                str(size): self._shapes.name(tier) for size, tier in sorted(self._tiers.items())
            },
            **self._estimate.state(),
            "drafted_share": round(self._drafted_share, 4),
            "probe": self._shapes.name(self._probe.tier) if self._probe else None,
        }
