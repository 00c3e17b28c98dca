"""Whether one request is worth drafting for: a smoothed share of its drafted rounds in which a
draft was accepted. A request that is not worth it pauses drafting, each time longer."""

MIN_SHARE = 0.1  # of its rounds with an accepted draft, below which a request pauses
MAX_PAUSE = 64  # rounds


class RequestPause:
    """When a request pauses drafting: its share of drafted rounds with an accepted draft is too
    small. The share starts at 1 and falls below MIN_SHARE after exactly `patience` rejected rounds
    in a row; one accepted draft among many rejected ones does not make up for them. The one round
    after a pause decides whether the request pauses twice as long or is drafted for as before.
    patience None: never."""

    __slots__ = ("_keep", "_next_pause", "num_pauses", "patience", "rounds_left", "share")

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        # Just enough: the share is above MIN_SHARE after patience - 1 rejections, below after
        # patience.
        self._keep = MIN_SHARE ** (1 / ((patience or 1) - 0.5))
        self._next_pause = patience or 0
        self.rounds_left = 0  # of a pause
        self.num_pauses = 0  # that have begun
        self.share = 1.0

    @property
    def is_on(self) -> bool:
        """Whether the request's next round should have no drafts."""
        return self.rounds_left > 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """What a round brought; called once a round. Outside a pause a round without drafts says
        nothing."""
        if self.patience is None:
            return
        if self.rounds_left:
            self.rounds_left -= 1
            return
        if not num_drafted:
            return
        if self.share < MIN_SHARE and num_accepted:  # after a pause
            self.share, self._next_pause = 1.0, self.patience
            return
        self.share = self._keep * self.share + (1 - self._keep) * (num_accepted > 0)
        if self.share < MIN_SHARE:
            self.rounds_left, self.num_pauses = self._next_pause, self.num_pauses + 1
            self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
