"""Small tensors between host and device without waiting: the loop never stops for a copy that it
does not read.

It knows neither rounds nor requests.
"""

from array import array
from collections.abc import Sequence

import torch


def to_device(
    values: "torch.Tensor | array[int] | Sequence[object]",
    device: torch.device,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Host values as a tensor on `device`. On CUDA the copy goes through pinned memory, in stream
    order. Of many integers an array of type "q" is read in a fraction of a list's time. out: where
    they go; None: to a new tensor."""
    is_async = device.type != "cpu"
    if isinstance(values, array):
        values = torch.frombuffer(values, dtype=torch.int64)
    if not isinstance(values, torch.Tensor):
        host = torch.tensor(values, pin_memory=is_async)
    elif is_async:
        # Not `pin_memory()`, which asks the driver about the memory first: that takes longer than
        # the copy.
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    else:
        host = values
    # Pinned memory that is dropped here goes to nobody else before torch knows that the copy from
    # it has ended.
    return host.to(device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)


class ToHost:
    """Tensors of one device on their way to the host, as they are now: what is written to them
    later does not count. `wait` is the only place where a round waits for the device. `places`:
    where the first of them goes, which is free for the next copy once it was waited for; None: to a
    new one."""

    def __init__(self, tensors: Sequence[torch.Tensor], places: "Places | None" = None) -> None:
        self._place: Place | None = None
        self._places: Places | None = Places() if places is None else places
        if tensors and tensors[0].is_cuda:
            self._place = self._places.take(tensors[0].shape, tensors[0].dtype)
            first = self._place.host.copy_(tensors[0], non_blocking=True)
            self._host = [first, *map(_start_copy, tensors[1:])]
            self._place.arrived.record()
        else:
            self._host = [_start_copy(tensor) for tensor in tensors]

    @property
    def is_here(self) -> bool:
        """Nothing has to be waited for."""
        return self._place is None

    def wait(self) -> list[torch.Tensor]:
        """Only valid until the next copy begins."""
        if self._place is not None:
            self._place.arrived.synchronize()
            if self._places is not None:
                self._places.give_back(self._place)
            self._place = None
        return self._host


class Place:
    """Pinned memory, and the event that says that a copy to it has ended."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no annotation


class Places:
    """Those that were read, by shape, for the next copies: making one takes as long as the copy.
    There are as many as copies were under way at once. One that is never read is lost, and harms
    nobody."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[Place]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Place:
        free = self._free.get((shape, dtype))
        return free.pop() if free else Place(torch.empty(shape, dtype=dtype, pin_memory=True))

    def give_back(self, place: Place) -> None:
        self._free.setdefault((place.host.shape, place.host.dtype), []).append(place)


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
