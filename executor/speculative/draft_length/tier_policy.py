"""The interface of a policy that chooses tiers and observes rounds, and the log of its switches.

A tier is one of `DraftShapes`: a draft length, or where trees may be chosen one of these."""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

NUM_KEPT = 32  # switches

logger = logging.getLogger(__name__)


class ObservedRound(NamedTuple):
    """What came of a round in which every request had the same tier."""

    num_requests: int  # whose results count
    batch_size: int  # padded to a CUDA graph: the round's time depends on it
    num_accepted: Sequence[int]  # of every request that was drafted for
    verified_tier: int | None  # of the drafts that were verified; None: as the policy says now
    seconds: float | None  # None: the round's time says nothing, e.g. it had context chunks
    max_tier: int  # what the limits allow at this batch size
    asked_draft_len: int | None = None  # drafts that the drafter was asked for, if it had fewer
    ranks: Sequence[Sequence[int]] = ()  # see `path_ranks`, where there are trees to choose from
    expected: Sequence[float] = ()  # see `RoundOutcome`


class TierPolicy(Protocol):
    """Chooses tiers for the batch sizes of one slot, from its `lower_bound` on."""

    lower_bound: int

    def tier_for(self, batch_size: int, max_tier: int) -> int:
        """The tier, at most `max_tier`; 0 = plain decoding. Asking changes no later answer."""

    def reachable(self, batch_size: int, max_tier: int) -> set[int]:
        """All that `tier_for` may ever answer."""

    def observe(self, observed: ObservedRound) -> bool:
        """Whether the tier for this batch size changed."""

    def state(self) -> dict[str, Any]:
        """What the choice rests on, as plain values."""


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

    def record(self, switch: Switch, context_len: int = 0) -> None:
        """context_len: of the bucket that the switch belongs to."""
        if context_len:
            reason = f"contexts of {context_len} tokens or more; {switch.reason}"
            switch = replace(switch, reason=reason)
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
