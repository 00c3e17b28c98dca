"""How long rounds take, as the host sees it: from one round's results to the next one's.

With overlap that is the device's time of a round, without it the device's and the host's together. A time says nothing
where the executor had nothing to do in between.
"""

from time import perf_counter


class RoundClock:
    """`stop` between rounds that do not follow each other."""

    def __init__(self) -> None:
        self._last: float | None = None

    def lap(self) -> float | None:
        """Seconds since the round before was read; None for the first one."""
        now, last = perf_counter(), self._last
        self._last = now
        return None if last is None else now - last

    def stop(self) -> None:
        self._last = None
