"""Where CUDA graphs leave their results for the host: a ring of pinned memory that the device
itself writes to, so that a round needs no copy behind its graph.

Device and host count results separately, and each entry carries its number: the host sees that it
reads what it means to. It knows tables of tokens; no requests, no graphs."""

import torch

from tllm_spec.executor.rounds.transfer import Place, ToHost
from tllm_spec.kernels.send_results import send_results
from tllm_spec.kernels.triton_support import has_kernels

# At most two rounds are launched and not read: one runs while the other is being read. The rest is
# for replays that nobody reads.
DEPTH = 4


class ResultRing:
    """Entries of at most `capacity` numbers. `send` is for graphs; whoever replays one calls `sent`
    behind it."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.zeros((DEPTH, 1 + capacity), dtype=torch.int64, pin_memory=is_cuda)
        self._places = [Place(entry) for entry in self._host] if is_cuda else []
        self._num_sent = torch.zeros(1, dtype=torch.int64, device=device)
        self._next = 0  # the host's count of the same
        self._entries: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def serves(device: torch.device) -> bool:
        """Plain torch on a CUDA device cannot write to the host's memory."""
        return device.type == "cpu" or has_kernels(device)

    def send(self, new_lens: torch.Tensor, new_tokens: torch.Tensor) -> None:
        """`[N]`, `[N, W]`: on their way to the host. A function of device tensors, so that a CUDA
        graph can hold it."""
        send_results(self._host, self._num_sent, new_lens, new_tokens)

    def sent(self, num_rows: int, width: int) -> ToHost:
        """The results that the work launched last sends: lengths and tokens of its first requests,
        `[N, W + 1]`. They are to be waited for before `DEPTH` more are sent."""
        number, self._next = self._next, self._next + 1
        index = number % DEPTH
        found = self._entries.get((index, num_rows, width))
        if found is None:
            entry = self._host[index]
            found = entry[:1], entry[1 : 1 + num_rows * (width + 1)].view(num_rows, width + 1)
            self._entries[index, num_rows, width] = found
        place = self._places[index] if self._places else None
        if place is not None:
            place.arrived.record()
        return _Entry(place, *found, number)

    def count_again(self) -> None:
        """Graphs were replayed that nobody told of. Waits for the device."""
        self._next = int(self._num_sent.item())


class _Entry(ToHost):
    """Results under way to the ring."""

    def __init__(
        self, place: Place | None, number: torch.Tensor, table: torch.Tensor, expected: int
    ) -> None:
        self._place, self._places = place, None
        self._host = [table]
        self._number, self._expected = number, expected

    def wait(self) -> list[torch.Tensor]:
        host = super().wait()
        (found,) = self._number.tolist()
        assert found == self._expected, f"results {found} are where {self._expected} should be"
        return host
