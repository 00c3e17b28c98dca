"""Copies between the host and the device that wait for nothing: values to the device, results to
the host, pages of host memory, and the states of texts; and how long the device takes for them."""

from array import array
from collections.abc import Sequence

import torch

from tllm_spec.attention.geometry import KVPool
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.slots.row_copies import send_results

# The device's time between two points of its stream.


class DeviceSpan:
    """A part of the device's stream. Begins where it is made and ends at `end`."""

    def __init__(self) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._events[0].record()

    def end(self) -> None:
        self._events[1].record()

    def seconds(self) -> float:
        """Waits for the end."""
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


# Copies of small tensors between host and device that nothing waits for, except for the one that
# the host reads.


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
        is_cuda = bool(tensors) and tensors[0].is_cuda
        hosts = [
            torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_cuda)
            for tensor in (tensors[1:] if is_cuda else tensors)
        ]
        if is_cuda:
            self._buffer = self._buffers.take(tensors[0].shape, tensors[0].dtype)
            hosts.insert(0, self._buffer.host)
        pairs = zip(hosts, tensors, strict=True)
        self._host = [host.copy_(tensor, non_blocking=True) for host, tensor in pairs]
        if self._buffer is not None:
            self._buffer.arrived.record()

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
        self.arrived = torch.cuda.Event()


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


# Copies of KV pages between device and host memory, next to the rounds.
#
# On CUDA the host's memory is pinned and the slow part, over PCIe, runs on a stream of its own,
# from or to a buffer on the device. The rounds' stream only copies between buffer and page, and
# waits for a page that comes back.


class HostCopies:
    """Between a place in host memory and a page of each layer group. Copies take effect in the
    order of the calls, and before the next forward. groups: the pools of each layer group, whose
    pages have the same numbers."""

    def __init__(self, groups: Sequence[Sequence[KVPool]], num_places: int) -> None:
        self._groups = groups
        device = groups[0][0].data.device
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)
        self._host = [
            [
                torch.empty(
                    (num_places, *pool.page(0).shape),
                    dtype=pool.data.dtype,
                    pin_memory=self._side is not None,
                )
                for pool in pools
            ]
            for pools in groups
        ]

    def save(self, pages: Sequence[int], place: int) -> None:
        for pools, hosts, page in zip(self._groups, self._host, pages, strict=True):
            for pool, host in zip(pools, hosts, strict=True):
                self._to_host(pool.page(page), host[place])

    def load(self, place: int, pages: Sequence[int]) -> None:
        for pools, hosts, page in zip(self._groups, self._host, pages, strict=True):
            for pool, host in zip(pools, hosts, strict=True):
                self._to_device(host[place], pool.page(page))

    def _to_host(self, page: torch.Tensor, host: torch.Tensor) -> None:
        if self._side is None:
            host.copy_(page)
            return
        # `contiguous` would make no copy of a page of one layer's latents, which is contiguous.
        buffer = page.clone(memory_format=torch.contiguous_format)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            host.copy_(buffer, non_blocking=True)
        buffer.record_stream(self._side)

    def _to_device(self, host: torch.Tensor, page: torch.Tensor) -> None:
        if self._side is None:
            page.copy_(host)
            return
        main = torch.cuda.current_stream()
        with torch.cuda.stream(self._side):  # also after the copy that filled the place
            buffer = host.to(page.device, non_blocking=True)
        main.wait_stream(self._side)
        buffer.record_stream(main)
        page.copy_(buffer)


# Where CUDA graphs leave their results for the host: a ring of pinned memory that the device
# itself writes to, so that a round needs no copy after its graph.
#
# Device and host count results separately, and each entry carries its number: the host can tell
# that it reads the entry it means to.


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


# Hidden states of a text on their way to the host (`record_hidden_states`).


class TextStates:
    """The rows of one text in the order of its tokens, as far as rounds with it were launched. Only
    `read` waits for the device. num_bytes: of the host's memory, at most; a text that needs more is
    dropped."""

    def __init__(self, num_bytes: int, row_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_dropped = False
        self._num_rows_left = num_bytes // row_bytes
        self._parts: list[tuple[ToHost, int, int | None]] = []

    def add(self, sent: ToHost, first: int, num_rows: int, *, is_window: bool) -> None:
        """A context chunk has these rows of sent states `[T, C]`, a window is the `first`-th of
        sent windows `[N, W, C]` with lengths `[N]`."""
        self._num_rows_left -= num_rows
        if self._num_rows_left < 0:
            self.is_dropped = True
            self._parts.clear()
        if not self.is_dropped:
            self._parts.append((sent, first, None if is_window else num_rows))

    def read(self) -> torch.Tensor:
        """`[T, C]`. A round that was launched after the text's end adds rows that mean nothing."""
        rows = []
        for sent, first, number in self._parts:
            states, *lens = sent.wait()
            if number is None:
                rows.append(states[first, : int(lens[0][first])])
            else:
                rows.append(states[first : first + number])
        return torch.cat(rows)
