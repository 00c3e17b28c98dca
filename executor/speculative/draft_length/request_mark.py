"""Whether one request is worth drafting for: a smoothed share of its drafted rounds in which a
draft was accepted.

It knows one request's outcomes and nothing of costs or of the batch; a marked request's window is
padding."""

from tllm_spec.adaptive_config import MarkOptions

NEVER = MarkOptions(mark_patience=None)


class RequestMark:
    """The share starts at 1 and falls below `mark_below` after exactly `mark_patience` rejected
    rounds in a row; one accepted draft among many rejected ones does not make up for them, unlike
    in a count of rejections in a row. A marked request pauses; the one round after a pause decides
    whether it pauses twice as long or is drafted for as before."""

    __slots__ = ("_keep", "_next_pause", "_options", "patience", "rounds_left", "share")

    def __init__(self, options: MarkOptions = NEVER) -> None:
        self._options = options
        self.patience = options.mark_patience  # None: never marked, and need not be told anything
        patience = options.mark_patience or 1
        # Just enough: the share is still above after patience - 1 rejections and below after
        # patience.
        self._keep = options.mark_below ** (1 / (patience - 0.5)) if options.mark_below else 1.0
        self._next_pause = patience
        self.rounds_left = 0  # of a pause
        self.share = 1.0

    @property
    def is_on(self) -> bool:
        """Whether the request's next round should have no drafts."""
        return self.rounds_left > 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """What a round brought; called once a round. No drafts outside a pause say nothing."""
        if self.patience is None:
            return
        if self.rounds_left:
            self.rounds_left -= 1
            return
        if not num_drafted:
            return
        was_marked = self.share < self._options.mark_below
        if was_marked and num_accepted:
            self.share, self._next_pause = 1.0, self.patience
            return
        self.share = self._keep * self.share + (1 - self._keep) * (num_accepted > 0)
        if self.share < self._options.mark_below:
            self.rounds_left = self._next_pause
            self._next_pause = min(2 * self._next_pause, self._options.mark_max_pause)
