"""When drafting for one request is not worth its time: an exponential back-off on rejected rounds.

It knows one request's outcomes and nothing of costs; choosing draft lengths for a batch is another matter.
"""

LONGEST_PAUSE = 64  # rounds; drafts may become good again when the text changes


class DraftPause:
    """After `patience` drafted rounds in a row without an accepted draft, drafting pauses for as many rounds; if the
    one round after a pause fails again, the next pause is twice as long. An accepted draft ends all this.
    `patience` None: never pause.
    """

    def __init__(self, patience: int | None) -> None:
        self._patience = patience
        self._rejected = 0  # drafted rounds since a draft was accepted
        self._length = patience or 0  # of the next pause
        self._left = 0  # rounds of this pause

    @property
    def is_on(self) -> bool:
        return self._left > 0

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """What a round brought; called once a round."""
        if self._left:
            self._left -= 1
        elif num_accepted:
            self._rejected, self._length = 0, self._patience or 0
        elif num_drafted and self._patience is not None:
            self._rejected += 1
            if self._rejected >= self._patience:
                self._left, self._length = self._length, min(2 * self._length, LONGEST_PAUSE)
