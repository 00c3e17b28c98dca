"""`strategy: ema`: SGLang's rule for one batch-size slot, bit for bit.

The mean number of accepted drafts of a round is smoothed. Every few rounds the draft length moves
along the ladder until it is about one above that mean. Round times and batch sizes play no part."""

from collections.abc import Callable
from math import ceil
from typing import Any

from tllm_spec.config.adaptive_config import EmaOptions
from tllm_spec.executor.speculative.draft_length.decisions import ObservedRound


class AdaptiveSpeculativeParams:
    """SGLang's rule for one slot, and SGLang's class name. Its tiers are draft lengths. `ema`
    starts at `draft_len - 1`. A switch resets neither `ema` nor the count of rounds.

    record: see `DecisionLog.record`. compat: every observation counts as if the present length had
    produced it, as in SGLang. Otherwise the length that produced it matters. Results of a longer
    one are clipped to the present length. Results of a shorter one do not count, unless the drafter
    was asked for the present length and had fewer drafts: the missing ones then count as
    rejected."""

    def __init__(
        self,
        lower_bound: int,
        options: EmaOptions,
        record: Callable[..., None],
        initial_steps: int | None,
        compat: bool,
    ) -> None:
        ladder = options.candidate_steps
        self.lower_bound, self._options = lower_bound, options
        self._record, self._compat = record, compat
        self._ladder = ladder
        self._rung = ladder.index(initial_steps) if initial_steps in ladder else len(ladder) // 2
        self.ema = float(self.draft_len - 1)
        self.num_rounds = 0

    @property
    def draft_len(self) -> int:
        return self._ladder[self._rung]

    def tier_for(self, batch_size: int, max_tier: int) -> int:
        """The present length, or the longest of the ladder within `max_tier`; 0 if there is
        none."""
        if self.draft_len <= max_tier:
            return self.draft_len
        return max((length for length in self._ladder if length <= max_tier), default=0)

    def reachable(self, batch_size: int, max_tier: int) -> set[int]:
        """All that `tier_for` may ever answer."""
        return {length for length in self._ladder if length <= max_tier} or {0}

    def observe(self, observed: ObservedRound, batch_size: int, max_tier: int) -> bool:
        """Whether the draft length changed."""
        draft_len = self.draft_len
        num_accepted, produced_by = observed.num_accepted, observed.verified_tier
        if observed.asked_draft_len is not None and produced_by is not None:
            produced_by = max(produced_by, observed.asked_draft_len)
        if produced_by is None or self._compat:
            produced_by = draft_len
        if not num_accepted or produced_by < draft_len:
            return False
        if produced_by > draft_len:
            num_accepted = [min(num, draft_len) for num in num_accepted]
        if draft_len > 0:
            alpha = self._options.ema_alpha
            self.ema = (1 - alpha) * self.ema + alpha * (sum(num_accepted) / len(num_accepted))
        self.num_rounds += 1
        num_counted = self.num_rounds - self._options.warmup_batches
        if num_counted <= 0 or num_counted % self._options.update_interval:
            return False
        self._rung = self._target()
        if self.draft_len == draft_len:
            return False
        reason = f"smoothed accepted drafts {self.ema:.2f}"
        self._record(self.lower_bound, batch_size, draft_len, self.draft_len, reason)
        return True

    def _target(self) -> int:
        if self.draft_len == 0:
            return self._up_from_zero()
        rung = self._after_falls(self._rung)
        if rung == self._rung:
            rung = self._after_rises(rung)
        return self._below_ceiling(rung)

    def _up_from_zero(self) -> int:
        """Plain decoding shows no acceptance, so the next rung is tried at every decision."""
        rung = min(1, len(self._ladder) - 1)
        if self._ladder[rung] > 0 and self.ema < 0:
            self.ema = float(self._ladder[rung] - 1)
        return rung

    def _after_falls(self, rung: int) -> int:
        while rung > 0:
            lower = self._ladder[rung - 1]
            threshold = (lower - 0.5 if lower > 0 else 0.5) + self._options.down_hysteresis
            if self.ema > threshold:
                break
            rung -= 1
        return rung

    def _after_rises(self, rung: int) -> int:
        """The threshold is that of the rung that is left, not of the one that is entered."""
        while rung < len(self._ladder) - 1:
            if self.ema <= self._ladder[rung] - 0.5 + self._options.up_hysteresis:
                break
            rung += 1
        return rung

    def _below_ceiling(self, rung: int) -> int:
        """Applies `ceiling_coeff`, except to a rise."""
        if not self._options.ceiling_coeff or rung > self._rung:
            return rung
        cap = max(1, ceil(self.ema * self._options.ceiling_coeff))
        while rung > 0 and self._ladder[rung] > cap:
            rung -= 1
        return rung

    def state(self) -> dict[str, Any]:
        return {"steps": self.draft_len, "ema_accept_len": self.ema, "num_rounds": self.num_rounds}
