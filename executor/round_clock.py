"""How long rounds take, as the host sees it: from one round's results to the next one's.

With overlap that is the device's time of a round, without it the device's and the host's together. The first round
after idle time has a prompt chunk in it, and its time counts for nothing anyway. On a CPU a round is over when it is
launched, however late it is read. A round that drafts behind prompts goes on when its results are here.
"""

from time import perf_counter


class RoundClock:
    """`stop` where a round broke off."""

    def __init__(self) -> None:
        self._last: float | None = None

    def lap(self, ended_at: float | None = None, *, is_over: bool = True) -> float | None:
        """Seconds since the round before ended; None for the first one, and where that was not `is_over` with its
        results. `ended_at`: perf_counter's; None: now."""
        now, last = perf_counter() if ended_at is None else ended_at, self._last
        self._last = now if is_over or ended_at is not None else None
        return None if last is None else now - last

    def stop(self) -> None:
        self._last = None
