"""Copies of small tensors between host and device that nothing waits for, except for the one that
the host reads."""

from array import array
from collections.abc import Sequence

import torch


def to_device(
    values: "torch.Tensor | array[int] | Sequence[object]",
    device: torch.device,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Host values as a tensor on `device`. On CUDA the copy goes through pinned memory, in stream
    order. An array of type "q" is read several times faster than a list of integers. out: where
    the values go; None: to a new tensor."""
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
    # torch reuses pinned memory only when the copies from it have ended.
    return host.to(device, non_blocking=True) if out is None else out.copy_(host, non_blocking=True)


class ToHost:
    """Tensors of one device on their way to the host, as they are at this point of the stream.

    `wait` is the only place where a round waits for the device. `buffers`: where the first tensor's
    memory comes from and goes back to after `wait`; None: it is allocated."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], buffers: "PinnedBuffers | None" = None
    ) -> None:
        self._buffer: PinnedBuffer | None = None
        self._buffers: PinnedBuffers | None = PinnedBuffers() if buffers is None else buffers
        if tensors and tensors[0].is_cuda:
            self._buffer = self._buffers.take(tensors[0].shape, tensors[0].dtype)
            first = self._buffer.host.copy_(tensors[0], non_blocking=True)
            self._host = [first, *map(_start_copy, tensors[1:])]
            self._buffer.arrived.record()
        else:
            self._host = [_start_copy(tensor) for tensor in tensors]

    @property
    def is_here(self) -> bool:
        """Nothing has to be waited for."""
        return self._buffer is None

    def wait(self) -> list[torch.Tensor]:
        """Only valid until the next copy begins."""
        if self._buffer is not None:
            self._buffer.arrived.synchronize()
            if self._buffers is not None:
                self._buffers.give_back(self._buffer)
            self._buffer = None
        return self._host


class PinnedBuffer:
    """Pinned memory, and the event that says that a copy to it has ended."""

    def __init__(self, host: torch.Tensor) -> None:
        self.host = host
        self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no annotation


class PinnedBuffers:
    """Buffers that were read, by shape, for the next copies: making one takes as long as the copy.
    One that is never read is freed like any other tensor."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype], list[PinnedBuffer]] = {}

    def take(self, shape: torch.Size, dtype: torch.dtype) -> PinnedBuffer:
        free = self._free.get((shape, dtype))
        if free:
            return free.pop()
        return PinnedBuffer(torch.empty(shape, dtype=dtype, pin_memory=True))

    def give_back(self, buffer: PinnedBuffer) -> None:
        self._free.setdefault((buffer.host.shape, buffer.host.dtype), []).append(buffer)


def _start_copy(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
