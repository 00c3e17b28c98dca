"""Says once that hardly any draft is accepted, and why that may be."""

import logging

logger = logging.getLogger(__name__)

MIN_DRAFTS = 300  # before anything is said
MIN_RATE = 0.01  # of drafts that are accepted; chance alone reaches less


class DraftWatch:
    """`warning`: what was logged, None before. causes: what may be wrong with this way of drafting,
    as the end of a sentence."""

    def __init__(self, causes: str) -> None:
        self.warning: str | None = None
        self._causes = causes
        self._num_drafted, self._num_accepted = 0, 0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Counts the drafts of a round, all of its requests together."""
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        is_useless = self._num_accepted < MIN_RATE * self._num_drafted
        if self.warning is None and is_useless and self._num_drafted >= MIN_DRAFTS:
            self.warning = (
                f"{self._num_accepted} of {self._num_drafted} drafts were accepted, so speculation "
                f"costs time and saves none. Likely causes: {self._causes}"
            )
            logger.warning("%s", self.warning)
