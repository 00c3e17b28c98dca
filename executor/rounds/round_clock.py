"""How long rounds take, as the host sees it: from the end of one round to the end of the next.

A round ends when its results are on the host; what the device does after sending them is not part
of the next round. With overlap a round's time is the device's, without it the device's and the
host's together. On a CPU a round ends when it was launched, however late it is read."""

from time import perf_counter

from tllm_spec.executor.device.transfer import DeviceSpan


class RoundClock:
    """Measures the time of each round. Call `stop` where a round was abandoned: the next one has no
    time."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._post_send: DeviceSpan | None = None

    def lap(
        self, ended_at: float | None = None, post_send: DeviceSpan | None = None
    ) -> float | None:
        """Seconds since the round before ended; None for the first one.

        ended_at: when the results were on the host, by perf_counter; None: now. post_send: what the
        device does after sending them, before it begins another round."""
        now, last = perf_counter() if ended_at is None else ended_at, self._last
        if last is not None and self._post_send is not None:
            # The host may have seen the results late: a round's time is never negative.
            last = min(last + self._post_send.seconds(), now)
        self._last, self._post_send = now, post_send
        return None if last is None else now - last

    def stop(self) -> None:
        self._last = self._post_send = None
