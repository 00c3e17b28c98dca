"""Small tensors between host and device without waiting: the loop never stops for a copy that it does not read.

It knows neither rounds nor requests.
"""

from collections.abc import Sequence

import torch


def to_device(values: torch.Tensor | Sequence[object], device: torch.device) -> torch.Tensor:
    """Host values as a tensor on `device`. On CUDA the copy goes through pinned memory, in stream order."""
    is_async = device.type != "cpu"
    if not isinstance(values, torch.Tensor):
        host = torch.tensor(values, pin_memory=is_async)
    elif is_async:
        # Not `pin_memory()`, which asks the driver about the memory first: that takes longer than the copy.
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
    else:
        host = values
    # Pinned memory that is dropped here goes to nobody else before torch knows that the copy from it has ended.
    return host.to(device, non_blocking=True)


class ToHost:
    """Tensors of one device on their way to the host, as they are now: what is written to them later does not count.
    `wait` is the only place where a round waits for the device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._host = [_start_copy(tensor) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no annotation
            self._arrived.record()

    @property
    def is_here(self) -> bool:
        """Nothing has to be waited for: the device is the host."""
        return self._arrived is None

    def wait(self) -> list[torch.Tensor]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
