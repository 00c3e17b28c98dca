"""Drafts that are made at draft length 0 and only compared with what plain decoding then emits.

A drafter on the host can say what it would have proposed, so that its acceptance is known although
nothing of it
is verified: the device never sees these drafts, and the text cannot depend on them. It knows
neither drafters nor policies, and no device."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import NamedTuple, Protocol

MAX_REQUESTS = 8  # whose drafts are compared at a time
MAX_SAVED_S = 0.005  # of the host's time


class GrowingText(Protocol):
    """A request, as far as it matters here. `tokens` only grows."""

    tokens: list[int]

    @property
    def is_finished(self) -> bool: ...


class Proposal(NamedTuple):
    """What might follow `request.tokens[:place]`; empty: the drafter had nothing. `is_wanted`: it
    was asked."""

    request: GrowingText
    place: int
    drafts: list[int]
    is_wanted: bool

    @property
    def num_accepted(self) -> int | None:
        """Drafts that plain decoding has emitted, up to the first that it has not; None: not known
        yet."""
        emitted = self.request.tokens[self.place : self.place + len(self.drafts)]
        for place, (token, draft) in enumerate(zip(emitted, self.drafts, strict=False)):
            if token != draft:
                return place
        return len(emitted) if len(emitted) == len(self.drafts) else None


class UnverifiedDrafts:
    """`learn` takes a batch size, the accepted drafts of each request that was asked for some, the
    longest draft, how many requests there were, and whether some of the batch are sampled.
    `time_share`: of the time between rounds that may go into making drafts."""

    def __init__(
        self,
        learn: Callable[[int, Sequence[int], int, int, bool], None],
        time_share: float,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._learn, self._time_share, self._clock = learn, time_share, clock
        self._proposals: list[Proposal] = []
        self._batch_size, self._sampled, self._turn = 0, False, 0
        self._last = clock()
        self._saved_s = 0.0  # below 0 after a look that took longer than was earned

    def is_due(self) -> bool:
        """Asked once in every round: whether the last drafts have been compared and there is time
        for others."""
        now = self._clock()
        self._saved_s = min(MAX_SAVED_S, self._saved_s + self._time_share * (now - self._last))
        self._last = now
        return not self._proposals and self._saved_s > 0

    def places(self, num_requests: int) -> list[int]:
        """Whose turn it is: places in a batch, others each time."""
        first, number = self._turn % num_requests, min(num_requests, MAX_REQUESTS)
        self._turn = first + number
        return [(first + place) % num_requests for place in range(number)]

    def add(self, batch_size: int, proposals: list[Proposal], sampled: bool = False) -> None:
        """Right behind the making of these drafts, the time for which began when `is_due` was
        asked."""
        self._saved_s -= self._clock() - self._last
        self._batch_size, self._sampled = batch_size, sampled
        self._proposals = proposals if any(proposal.drafts for proposal in proposals) else []

    def compare(self) -> None:
        """Before a round, when all rounds before it have been read. What a request's end cut off
        shows nothing."""
        if not self._proposals:
            return
        known = [(proposal, proposal.num_accepted) for proposal in self._proposals]
        if any(number is None and not proposal.request.is_finished for proposal, number in known):
            return
        accepted = [
            number for proposal, number in known if number is not None and proposal.is_wanted
        ]
        num_requests = sum(number is not None for _, number in known)
        longest = max(len(proposal.drafts) for proposal in self._proposals)
        self._proposals = []
        if accepted:
            self._learn(self._batch_size, accepted, longest, num_requests, self._sampled)
