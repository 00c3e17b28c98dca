"""How likely a draft at each position of the window is accepted, given that all before it were.

A decayed count per position. A position with little evidence follows the average of the others."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

MIN_RATE, MAX_RATE = 0.001, 0.999  # an estimate never becomes certain
PRIOR_TRIALS = 4.0  # drafts that the prior counts for, and that an old estimate fades to
PRIOR_ROUNDS = 64.0  # after which the prior is about what was seen, even if that is old by now
SHARED_TRIALS = 8.0  # drafts that the average of all positions counts for at each of them
MIN_ROUNDS = 8  # memory in rounds, where few rounds fill the window
UNSEEN_SHARE = 0.25  # of the window, that positions beyond the present draft length fade to
IDLE_REQUESTS = 8  # a round without drafts ages an estimate as so many requests do


class AcceptanceEstimate:
    """Acceptance by position. A round of K drafts of which n were accepted shows positions 1 to
    min(n + 1, K).

    rates: by position. expected_accepted `[K + 1]`: expected accepted drafts by draft length. The
    memory is `window` drafts per position. Without new drafts a count's weight fades and its value
    stays: an old bad estimate is not retried for its age, but one probe then moves it far."""

    def __init__(self, num_positions: int, prior: float, window: float) -> None:
        self._prior, self._window = prior, window
        self._reached = [0.0] * num_positions
        self._accepted = [0.0] * num_positions
        self.rates = [prior] * num_positions
        self.expected_accepted = list(accumulate(accumulate(self.rates, mul), initial=0.0))

    def observe(self, num_requests: int, num_accepted: Sequence[int], draft_len: int) -> None:
        """num_accepted: of every request that was drafted for, with `draft_len` drafts each."""
        has_drafts = draft_len > 0 and len(num_accepted) > 0
        if has_drafts:
            self._age(num_requests, max(PRIOR_TRIALS, UNSEEN_SHARE * self._window))
        else:
            self._age(max(num_requests, IDLE_REQUESTS), PRIOR_TRIALS)
        if has_drafts and self.rates:
            self._count(num_accepted, min(draft_len, len(self.rates)))
            self._combine()

    def observe_counts(self, num_requests: int, counts: Sequence[tuple[int, int]]) -> None:
        """counts: by position, requests that reached it and those whose draft was accepted."""
        self._age(num_requests, max(PRIOR_TRIALS, UNSEEN_SHARE * self._window))
        for position, (reached, accepted) in enumerate(counts[: len(self.rates)]):
            self._reached[position] += reached
            self._accepted[position] += accepted
        self._combine()

    def _age(self, num_requests: int, least: float) -> None:
        keep = 1 - 1 / max(self._window / num_requests, MIN_ROUNDS)
        for position, reached in enumerate(self._reached):
            if reached > least:
                factor = max(keep, least / reached)
                self._reached[position] *= factor
                self._accepted[position] *= factor

    def _count(self, num_accepted: Sequence[int], draft_len: int) -> None:
        # `bytes.count` takes a tenth of a list's time; a byte holds at most 255.
        lengths = bytes(num_accepted) if max(num_accepted) < 256 else num_accepted
        reached = len(num_accepted)
        for position in range(draft_len):
            if not reached:
                break
            self._reached[position] += reached
            reached -= lengths.count(position)
            self._accepted[position] += reached

    def _combine(self) -> None:
        trials = sum(self._reached) + PRIOR_TRIALS
        level = (sum(self._accepted) + PRIOR_TRIALS * self._prior) / trials
        self._prior += (level - self._prior) / PRIOR_ROUNDS
        probability, expected = 1.0, 0.0
        for position, reached in enumerate(self._reached):
            rate = (self._accepted[position] + SHARED_TRIALS * level) / (reached + SHARED_TRIALS)
            rate = min(max(rate, MIN_RATE), MAX_RATE)
            self.rates[position] = rate
            probability *= rate
            expected += probability
            self.expected_accepted[position + 1] = expected
