"""What the user forbids: drafts for many requests, more drafts than a schedule has, drafts that are
not accepted.

A limit says how many drafts a round may have at most. Which length within it is best, it does not
know."""

import logging
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

NO_LIMIT = sys.maxsize
# Where others may join, windows leave contexts one row in so many: else drafts could keep every
# prompt waiting.
CONTEXT_SHARE = 4
CLOSED_WINDOWS = (
    99  # closed for so many windows of rounds, then open for one: drafts in 1% of the rounds
)


class AcceptanceGate:
    """`acceptance_rate_threshold` over `acceptance_rate_window_size`: closes when fewer of the
    drafts in the last `window_size` drafted rounds were accepted. TensorRT-LLM never opens it
    again; here one window in 100 tries."""

    def __init__(self, threshold: float, window_size: int) -> None:
        self._threshold, self._window_size = threshold, window_size
        self._window: deque[tuple[int, int]] = deque(maxlen=window_size)
        self._closed_rounds = 0

    @property
    def is_closed(self) -> bool:
        return self._closed_rounds > 0

    def observe(self, num_accepted: Sequence[int], num_drafted: int) -> None:
        """A round of `num_drafted` drafts in all. Those without say nothing, but a closed gate
        counts them."""
        if self._closed_rounds:
            self._closed_rounds -= 1  # one that was still in flight when the gate closed counts too
            if not self._closed_rounds:
                logger.info("acceptance gate: opens, to see %d rounds of drafts", self._window_size)
        elif num_drafted:
            self._window.append((sum(num_accepted), num_drafted))
            if len(self._window) == self._window_size and self.rate < self._threshold:
                logger.info(
                    "acceptance gate: closes, as %.3f of the drafts of the last %d rounds were "
                    "accepted, less than %g",
                    self.rate,
                    self._window_size,
                    self._threshold,
                )
                self._closed_rounds = CLOSED_WINDOWS * self._window_size
                self._window.clear()

    @property
    def rate(self) -> float:
        """Accepted drafts / drafts in the window; 0 when it is empty."""
        return sum(accepted for accepted, _ in self._window) / max(
            1, sum(drafted for _, drafted in self._window)
        )


class DraftLenLimits:
    """`schedule` maps batch sizes to draft lengths: the entry of the largest key not above the
    batch size holds, and below all keys nothing is limited. `max_concurrency`: no drafts with more
    requests than that. `max_num_tokens`: all windows of a round together, and contexts with them
    where requests are fewer than `max_batch_size`."""

    def __init__(
        self,
        *,
        max_concurrency: int | None = None,
        schedule: Mapping[int, int] | None = None,
        gate: AcceptanceGate | None = None,
        max_num_tokens: int = NO_LIMIT,
        max_batch_size: int = 0,
    ) -> None:
        self._max_concurrency = NO_LIMIT if max_concurrency is None else max_concurrency
        self._sizes = sorted(schedule or {})
        self._schedule = dict(schedule or {})
        self._gate, self._max_num_tokens, self._max_batch_size = (
            gate,
            max_num_tokens,
            max_batch_size,
        )
        self._most: dict[
            int, int
        ] = {}  # batch size, of those that were asked about: `max_steps_open`

    def max_steps(self, batch_size: int) -> int:
        """The most drafts of a round with `batch_size` generating requests."""
        if self._gate is not None and self._gate.is_closed:
            return 0
        return self.max_steps_open(batch_size)

    def max_steps_open(self, batch_size: int) -> int:
        """The same while the gate is open."""
        most = self._most.get(batch_size)
        if most is None:
            most = self._most[batch_size] = self._find_most(batch_size)
        return most

    def _find_most(self, batch_size: int) -> int:
        if batch_size > self._max_concurrency:
            return 0
        room = NO_LIMIT
        if self._max_num_tokens != NO_LIMIT:
            others_may_join = batch_size < self._max_batch_size
            rows = (
                rows_with_contexts(self._max_num_tokens)
                if others_may_join
                else self._max_num_tokens
            )
            room = max(0, rows // batch_size - 1)
        place = bisect_right(self._sizes, batch_size)
        return min(room, self._schedule[self._sizes[place - 1]]) if place else room

    def observe(self, num_accepted: Sequence[int], num_drafted: int) -> None:
        if self._gate is not None:
            self._gate.observe(num_accepted, num_drafted)

    @property
    def has_gate(self) -> bool:
        return self._gate is not None

    @property
    def reachable(self) -> tuple[int, ...]:
        """Lengths that a limit may ask for although no ladder has them."""
        may_be_off = self._gate is not None or self._max_concurrency != NO_LIMIT
        return tuple(sorted({*self._schedule.values(), *([0] if may_be_off else [])}))

    def state(self) -> dict[str, Any]:
        gate = self._gate and {
            "is_closed": self._gate.is_closed,
            "acceptance_rate": round(self._gate.rate, 4),
        }
        return {
            "max_concurrency": None if self._max_concurrency == NO_LIMIT else self._max_concurrency,
            "draft_len_schedule": self._schedule or None,
            "gate": gate,
        }


def rows_with_contexts(max_num_tokens: int) -> int:
    """Of a round: what windows may have of them where others may join."""
    return max_num_tokens - max_num_tokens // CONTEXT_SHARE
