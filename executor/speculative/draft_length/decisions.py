"""What a policy observes of a round, and the log of what policies decide.

A tier is one of `DraftShapes`: a draft length, or where trees may be chosen one of these."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

NUM_KEPT = 32  # switches

logger = logging.getLogger(__name__)


class ObservedRound(NamedTuple):
    """What came of a round in which every request had the same tier."""

    batch_size: int  # generating requests
    num_accepted: Sequence[int]  # of every request that was drafted for, which may be fewer
    # Of the drafts that were verified, e.g. 0 in the round after plain decoding; None: the present
    # one.
    verified_tier: int | None = None
    seconds: float | None = None  # None: the round's time says nothing, e.g. it had context chunks
    num_requests: int | None = None  # whose results count, if some had ended already
    num_drafted: int | None = None  # really proposed, if not `verified_tier` for each
    asked_draft_len: int | None = None  # drafts that the drafter was asked for, if it had fewer
    ranks: Sequence[Sequence[int]] = ()  # see `path_ranks`, where there are trees to choose from
    expected: Sequence[float] = ()  # see `RoundOutcome`
    context_len: int = 0  # of the controller when the round was chosen
    # By tier of copied drafts: the rounds, 1 or less, that a token of the text would have taken.
    hindsight: Mapping[int, float] = MappingProxyType({})
    is_cut: bool = False  # windows were shorter than the copied drafts, so they show nothing

    @property
    def num_alive(self) -> int:
        """Requests whose results count."""
        return self.batch_size if self.num_requests is None else self.num_requests


class DecisionLog:
    """The latest switches; each is also a line in the log."""

    def __init__(self) -> None:
        self._last: deque[dict[str, Any]] = deque(maxlen=NUM_KEPT)
        self.num_switches = 0

    def record(
        self,
        slot: int,
        batch_size: int,
        old_steps: int | str,
        new_steps: int | str,
        reason: str,
        context_len: int = 0,
    ) -> None:
        """A draft length (`DraftShapes.name`) of one batch size, as padded to a graph, was
        replaced. slot: its smallest batch size. context_len: of the bucket of the switch."""
        if context_len:
            reason = f"contexts of {context_len} tokens or more; {reason}"
        self.num_switches += 1
        self._last.append(
            {
                "slot": slot,
                "batch_size": batch_size,
                "old_steps": old_steps,
                "new_steps": new_steps,
                "reason": reason,
            }
        )
        logger.info(
            "draft length %s -> %s at batch size %d (slot %d): %s",
            *(old_steps, new_steps, batch_size, slot, reason),
        )

    def state(self) -> dict[str, Any]:
        return {"num_switches": self.num_switches, "last": list(self._last)}
