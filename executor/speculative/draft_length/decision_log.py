"""Switches of the draft length with their reasons: one log line each, and the last ones kept."""

import logging
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

NUM_KEPT = 32

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Switch:
    """A draft length of one batch size was replaced."""

    slot: int  # smallest batch size of the slot
    batch_size: int  # as padded to a graph
    old_steps: int | str  # see `DraftShapes.name`
    new_steps: int | str
    reason: str


class DecisionLog:
    """The latest switches; each is also a line in the log."""

    def __init__(self) -> None:
        self._last: deque[Switch] = deque(maxlen=NUM_KEPT)
        self.num_switches = 0

    def record(self, switch: Switch) -> None:
        self.num_switches += 1
        self._last.append(switch)
        logger.info(
            "draft length %s -> %s at batch size %d (slot %d): %s",
            switch.old_steps,
            switch.new_steps,
            switch.batch_size,
            switch.slot,
            switch.reason,
        )

    def state(self) -> dict[str, Any]:
        return {
            "num_switches": self.num_switches,
            "last": [asdict(switch) for switch in self._last],
        }


class BucketLog(DecisionLog):
    """Switches of rounds with contexts of `context_len` tokens or more; they go to `log`."""

    def __init__(self, log: DecisionLog, context_len: int) -> None:
        super().__init__()
        self._log, self._context_len = log, context_len

    def record(self, switch: Switch) -> None:
        reason = f"contexts of {self._context_len} tokens or more; {switch.reason}"
        self._log.record(replace(switch, reason=reason))
