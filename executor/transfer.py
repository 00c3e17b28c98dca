"""Small tensors between host and device without waiting: the loop never stops for a copy that it does not read.

It knows neither rounds nor requests.
"""

from collections.abc import Sequence

import torch


def to_device(values: torch.Tensor | Sequence[object], device: torch.device) -> torch.Tensor:
    """Host values as a tensor on `device`. On CUDA the copy goes through pinned memory, in stream order."""
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class ToHost:
    """Tensors on their way to the host. `wait` is the only place where a round waits for the device."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._host = [_start_copy(tensor) for tensor in tensors]
        self._arrived: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
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
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
