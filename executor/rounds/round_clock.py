"""How long rounds take, as the host sees it: from one round's end to the next one's.

A round ends with its results, but for what it drafts behind prompts: that goes on when they are
here. With overlap a round's time is the device's, without it the device's and the host's together.
The first round after idle time has a prompt chunk in it, and its time counts for nothing anyway. On
a CPU a round is over when it is launched, however late it is read."""

from time import perf_counter

from tllm_spec.executor.rounds.device_span import DeviceSpan


class RoundClock:
    """`stop` where a round broke off."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._behind: DeviceSpan | None = None

    def lap(self, ended_at: float | None = None, behind: DeviceSpan | None = None) -> float | None:
        """Seconds since the round before ended; None for the first one. `ended_at`: when its
        results were here, by perf_counter; None: now. `behind`: what the device does behind them,
        before it begins another round."""
        now, last = perf_counter() if ended_at is None else ended_at, self._last
        if last is not None and self._behind is not None:
            last = min(
                last + self._behind.seconds(), now
            )  # the host may have seen the results late
        self._last, self._behind = now, behind
        return None if last is None else now - last

    def stop(self) -> None:
        self._last = self._behind = None
