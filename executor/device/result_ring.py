"""Where CUDA graphs leave their results for the host: a ring of pinned memory that the device
itself writes to, so that a round needs no copy after its graph.

Device and host count results separately, and each entry carries its number: the host can tell that
it reads the entry it means to."""

import torch

from tllm_spec.executor.device.transfer import PinnedBuffer, ToHost
from tllm_spec.kernels.send_results import send_results
from tllm_spec.kernels.triton_support import has_kernels

# At most two rounds are launched and not read: one runs while the other is being read. The others
# are for replays whose results are not read.
DEPTH = 4


class ResultRing:
    """Pinned memory that graphs write results to. Entries of at most `capacity` numbers. A graph
    holds `send`; after each replay of it the host calls `sent`."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros((DEPTH, 1 + capacity), dtype=torch.int64, pin_memory=is_cuda)
        self._buffers = [PinnedBuffer(entry) for entry in self._host] if is_cuda else []
        self._num_sent = torch.zeros(1, dtype=torch.int64, device=device)
        self._next = 0  # the host's count of the same
        self._entries: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Plain torch on a CUDA device cannot write to the host's memory."""
        return device.type == "cpu" or has_kernels(device)

    def send(self, new_lens: torch.Tensor, new_tokens: torch.Tensor) -> None:
        """Sends `[N]` and `[N, W]` to the host. A function of device tensors, so that a CUDA graph
        can hold it."""
        send_results(self._host, self._num_sent, new_lens, new_tokens)

    def sent(self, num_rows: int, width: int) -> ToHost:
        """The results that the work launched last sends: lengths and tokens of its first requests,
        `[N, W + 1]`. They must be waited for before `DEPTH` more are sent."""
        number, self._next = self._next, self._next + 1
        index = number % DEPTH
        found = self._entries.get((index, num_rows, width))
        if found is None:
            entry = self._host[index]
            found = entry[:1], entry[1 : 1 + num_rows * (width + 1)].view(num_rows, width + 1)
            self._entries[index, num_rows, width] = found
        buffer = self._buffers[index] if self._buffers else None
        if buffer is not None:
            buffer.arrived.record()
        return _Entry(buffer, *found, number)

    def count_again(self) -> None:
        """Takes over the device's count, after replays without `sent`. Waits for the device."""
        self._next = int(self._num_sent.item())


class _Entry(ToHost):
    """Results on their way to the ring."""

    def __init__(
        self, buffer: PinnedBuffer | None, number: torch.Tensor, table: torch.Tensor, expected: int
    ) -> None:
        self._buffer, self._buffers = buffer, None
        self._host = [table]
        self._number, self._expected = number, expected

    def wait(self) -> list[torch.Tensor]:
        host = super().wait()
        (found,) = self._number.tolist()
        assert found == self._expected, f"results {found} are where {self._expected} should be"
        return host
