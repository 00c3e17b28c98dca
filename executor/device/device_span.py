"""The device's time between two points of its stream."""

import torch


class DeviceSpan:
    """A part of the device's stream. Begins where it is made and ends at `end`."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call] # torch's
        self._events[0].record()

    def end(self) -> None:
        self._events[1].record()

    def seconds(self) -> float:
        """Waits for the end."""
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3
