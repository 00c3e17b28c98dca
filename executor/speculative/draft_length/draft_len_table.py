"""The longest draft length of a round, by its batch size: from a fixed length, a schedule or a
concurrency limit, less where the token budget of a forward has no room, none while the acceptance
gate is closed. A policy chooses within it."""

import logging
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

NO_LIMIT = sys.maxsize
# While more requests may join, windows leave one row in so many to contexts. Otherwise drafts could
# keep every prompt waiting.
CONTEXT_SHARE = 4
# A gate stays closed for so many windows of rounds, then opens for one: drafts in 1% of the rounds.
CLOSED_WINDOWS = 99


class AcceptanceGate:
    """Closes when the share of accepted drafts over the last `window_size` rounds with drafts is
    below `threshold`. TensorRT-LLM never opens it again; here it opens for one window in 100."""

    def __init__(self, threshold: float, window_size: int) -> None:
        self._threshold, self._window_size = threshold, window_size
        self._window: deque[tuple[int, int]] = deque(maxlen=window_size)
        self._closed_rounds = 0

    @property
    def is_closed(self) -> bool:
        return self._closed_rounds > 0

    def observe(self, num_accepted: Sequence[int], num_drafted: int) -> None:
        """num_drafted: drafts of the whole round. Rounds without drafts count only while the gate
        is closed."""
        if self._closed_rounds:
            self._closed_rounds -= 1  # includes rounds that were in flight when the gate closed
            if not self._closed_rounds:
                logger.info("acceptance gate: opens for %d rounds of drafts", self._window_size)
        elif num_drafted:
            self._window.append((sum(num_accepted), num_drafted))
            if len(self._window) == self._window_size and self.rate < self._threshold:
                logger.info(
                    "acceptance gate: closes; acceptance rate %.3f of %d rounds is below %g",
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


class DraftLenTable:
    """The largest tier that a round may have. by_batch_size: see `draft_len_table`.
    max_num_tokens: rows of a forward. All windows of a round fit into it; in batches below
    `max_batch_size` they leave room for contexts. tier_within: the last tier whose windows, and
    those of all before it, have at most so many rows."""

    def __init__(
        self,
        by_batch_size: Mapping[int, int] = MappingProxyType({}),
        *,
        gate: AcceptanceGate | None = None,
        max_num_tokens: int = NO_LIMIT,
        max_batch_size: int = 0,
        tier_within: Callable[[int], int] = lambda num_rows: max(0, num_rows - 1),
    ) -> None:
        self._rows = sorted(by_batch_size.items())
        self._gate = gate
        self._max_num_tokens, self._max_batch_size = max_num_tokens, max_batch_size
        self._tier_within = tier_within
        self._most: dict[int, int] = {}  # by batch size: results of `max_tier_open`

    def max_tier(self, batch_size: int) -> int:
        """The largest tier of a round with `batch_size` generating requests."""
        if self._gate is not None and self._gate.is_closed:
            return 0
        return self.max_tier_open(batch_size)

    def max_tier_open(self, batch_size: int) -> int:
        """The same while the gate is open."""
        most = self._most.get(batch_size)
        if most is None:
            most = self._most[batch_size] = self._find_most(batch_size)
        return most

    def _find_most(self, batch_size: int) -> int:
        room = NO_LIMIT
        if self._max_num_tokens != NO_LIMIT:
            rows = self._max_num_tokens
            if batch_size < self._max_batch_size:
                rows = rows_with_contexts(rows)
            room = self._tier_within(rows // batch_size)
        found = [most for size, most in self._rows if size <= batch_size]
        return min([room, *found[-1:]])

    def observe(self, num_accepted: Sequence[int], num_drafted: int) -> None:
        if self._gate is not None:
            self._gate.observe(num_accepted, num_drafted)

    @property
    def has_gate(self) -> bool:
        return self._gate is not None

    @property
    def reachable(self) -> set[int]:
        """Tiers of the table, whether or not a ladder has them."""
        return {most for _, most in self._rows} | ({0} if self.has_gate else set())

    def state(self) -> dict[str, Any]:
        gate = self._gate and {
            "is_closed": self._gate.is_closed,
            "acceptance_rate": round(self._gate.rate, 4),
        }
        schedule = {size: most for size, most in self._rows if size}
        return {"draft_len_schedule": schedule or None, "gate": gate}


def rows_with_contexts(max_num_tokens: int) -> int:
    """Rows that windows may use in a round with fewer requests than the largest batch."""
    return max_num_tokens - max_num_tokens // CONTEXT_SHARE
