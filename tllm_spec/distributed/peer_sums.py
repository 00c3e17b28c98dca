"""What ranks exchange in one kernel that writes into the other ranks' memory: one-shot sums, where
every rank adds all values, two-shot sums, where each adds a part, and offered tokens."""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, TypeVar

import torch

from tllm_spec.distributed.communicator import Collectives, Communicator
from tllm_spec.kernels.nvrtc import checked, is_installed
from tllm_spec.kernels.parallel.rank_sum import (
    BLOCK_WORDS,
    WORD_BYTES,
    RankLines,
    rank_best,
    rank_sum,
    serves,
)
from tllm_spec.kernels.parallel.two_shot_sum import PART_WORDS, RankParts, two_shot_sum

# Which way of summing small tensors is the fastest for each size: measured when the ranks meet,
# decided by rank 0.


logger = logging.getLogger(__name__)

# Bytes; from one row of a small model to 1,024 rows of a large one. Larger sums are NCCL's.
SIZES = tuple(1 << power for power in range(12, 25))
IN_A_ROW = 50  # sums of a graph that is timed
WEIGHT_SIZE = 4096  # rows and columns of a GEMM before each sum; 32 MiB are not in the L2 cache
NCCL = "nccl"
Way = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds the sum of all ranks' first tensor to the second one."""


class PeerSum:
    """One way of summing: by a kernel, of at most `capacity` words. `kernel`: gets the values and,
    if it is to add their sum to another tensor, that one."""

    def __init__(self, kernel: Callable[..., None], capacity: int) -> None:
        self._kernel, self._capacity = kernel, capacity
        self.max_bytes = capacity * WORD_BYTES

    def serves(self, values: torch.Tensor) -> bool:
        """Whether it serves these values: it follows from size, dtype and layout, so it is the same
        on all ranks."""
        return serves(values, self._capacity)

    def __call__(self, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
        """The sum of all ranks' values, in place. If `add_to` is given it is added to that, and
        `values` is scratch afterwards."""
        if add_to is None or add_to.is_contiguous():
            self._kernel(values, add_to)
        else:
            self._kernel(values)
            add_to.add_(values)


class ChosenSums(Collectives):
    """Collectives whose sums run in the fastest way for their size. `others`: ways of summing other
    than NCCL's. choice: the fastest one's name for tensors of up to each of `SIZES`."""

    def __init__(self, others: Mapping[str, PeerSum], choice: Sequence[str]) -> None:
        self._by_size = [others.get(name) for name in choice]

    def all_reduce(self, values: torch.Tensor) -> None:
        if (chosen := self._way_of(values)) is not None:
            chosen(values)
        else:
            super().all_reduce(values)

    def all_reduce_into(self, total: torch.Tensor, values: torch.Tensor) -> None:
        if (chosen := self._way_of(values)) is not None:
            chosen(values, total)
        else:
            super().all_reduce_into(total, values)

    def _way_of(self, values: torch.Tensor) -> PeerSum | None:
        """None: NCCL's."""
        index = bisect_left(SIZES, values.numel() * values.element_size())
        chosen = self._by_size[index] if index < len(SIZES) else None
        return chosen if chosen is not None and chosen.serves(values) else None


def choose_sums(
    others: Mapping[str, PeerSum], seconds: Callable[[Way, int], float], share: Callable[[Any], Any]
) -> ChosenSums:
    """seconds: of adding one sum of so many bytes. All ranks measure together, and rank 0's times
    count: `share` returns rank 0's value."""
    times = [
        {NCCL: seconds(nccl_sum, size)}
        | {name: seconds(way, size) for name, way in others.items() if size <= way.max_bytes}
        for size in SIZES
    ]
    choice = share([min(found, key=lambda name: found[name]) for found in times])
    for size, name, found in zip(SIZES, choice, times, strict=True):
        shown = ", ".join(f"{way} {1e6 * time:.1f} us" for way, time in found.items())
        logger.info("sums of up to %d bytes: %s (%s)", size, name, shown)
    return ChosenSums(others, choice)


def nccl_sum(values: torch.Tensor, add_to: torch.Tensor) -> None:
    Collectives().all_reduce_into(add_to, values)


def graph_seconds(device: torch.device) -> Callable[[Way, int], float]:
    """Times a sum as decoding runs it: in a CUDA graph, added to other values, each after a GEMM of
    one row, whose time is subtracted. Back to back a kernel that is slow to launch looks worse than
    it is in a round, where the GEMM hides its launch."""
    weights = torch.zeros(WEIGHT_SIZE, WEIGHT_SIZE, dtype=torch.bfloat16, device=device)
    row = weights.new_zeros(1, WEIGHT_SIZE)
    result = torch.empty_like(row)

    def gemm() -> None:
        torch.mm(row, weights, out=result)

    of_gemms = _seconds_in_graph(gemm, device)

    def seconds(way: Way, num_bytes: int) -> float:
        values = weights.new_zeros(num_bytes // 2)
        total = torch.zeros_like(values)

        def gemm_and_sum() -> None:
            gemm()
            way(values, total)

        return _seconds_in_graph(gemm_and_sum, device) - of_gemms

    return seconds


def _seconds_in_graph(work: Callable[[], None], device: torch.device) -> float:
    """Seconds of one piece of work, of many in a row."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()  # lets libraries allocate, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(IN_A_ROW):
            work()
    graph.replay()
    torch.cuda.synchronize(device)
    start = perf_counter()
    graph.replay()
    torch.cuda.synchronize(device)
    return (perf_counter() - start) / IN_A_ROW


# Device memory that all ranks of a host read and write, by CUDA's interprocess handles. torch's
# symmetric memory counts what a process has exchanged, so it hangs between an old and a new
# process: when a program's second model starts ranks of its own.


Result = TypeVar("Result")
NO_DRIVER = "cuda-python is not installed; pip install 'tllm_spec[cuda]'"


class NoPeerMemory(Exception):
    """One rank cannot reach the others' memory. Raised on every rank."""


class PeerMemory:
    """`num_bytes` zeros on the device of every rank. All ranks make and close it at the same time.

    Attributes:
        addresses: where the memory of each rank is for this rank.

    Raises:
        NoPeerMemory: on all ranks, if one cannot reach another's device, or has no cuda-python.
    """

    def __init__(self, num_bytes: int, device: torch.device, communicator: Communicator) -> None:
        self.addresses: list[int] = []
        self._device, self._communicator = device, communicator
        self._own, self._peers = 0, list[int]()
        self._on_all(_check_driver)
        try:
            handles = self._on_all(lambda: self._export(num_bytes))
            addresses = self._on_all(lambda: self._open(handles))
        except NoPeerMemory:
            self.close()
            raise
        self.addresses = addresses[communicator.mapping.rank]

    def close(self) -> None:
        """Memory is freed once no rank has it open."""
        from cuda.bindings import driver

        torch.cuda.synchronize(self._device)
        while self._peers:
            checked(driver.cuIpcCloseMemHandle(self._peers.pop()))
        self._communicator.gather(None)
        if self._own:
            checked(driver.cuMemFree(self._own))
            self._own = 0

    def _export(self, num_bytes: int) -> bytes:
        """The handle of this rank's memory."""
        from cuda.bindings import driver

        torch.cuda.synchronize(self._device)  # makes the device's context the current one
        self._own = int(checked(driver.cuMemAlloc(num_bytes)))
        checked(driver.cuMemsetD8(self._own, 0, num_bytes))
        torch.cuda.synchronize(self._device)  # zero before another rank writes
        handle = checked(driver.cuIpcGetMemHandle(self._own))
        return ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE)

    def _open(self, handles: list[bytes]) -> list[int]:
        """The addresses of all ranks' memory here."""
        from cuda.bindings import driver

        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        addresses = []
        for rank, data in enumerate(handles):
            if rank == self._communicator.mapping.rank:
                addresses.append(self._own)
                continue
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), data, len(data))
            self._peers.append(int(checked(driver.cuIpcOpenMemHandle(handle, flags))))
            addresses.append(self._peers[-1])
        return addresses

    def _on_all(self, work: Callable[[], Result]) -> list[Result]:
        """What every rank's `work` returns, by rank. NoPeerMemory on all if it fails on one."""
        result: Any = None
        problem = ""
        try:
            result = work()
        except RuntimeError as error:
            problem = str(error)
        found = self._communicator.gather([result, problem])
        if problems := [each for _, each in found if each]:
            raise NoPeerMemory(problems[0])
        return [each for each, _ in found]


def _check_driver() -> None:
    if not is_installed():
        raise RuntimeError(NO_DRIVER)


MAX_ONE_SHOT = 1 << 20  # bytes; two-shot, a larger sum sends half as much even with two ranks


class PeerSums:
    """Both ways of summing, and exchanges of offers, on `device` of two or more ranks. Every rank
    makes one, and closes it, at the same time.

    Attributes:
        ways: by their names.

    Raises:
        NoPeerMemory: on all ranks where the devices cannot write each other's memory.
    """

    def __init__(self, device: torch.device, communicator: Communicator) -> None:
        rank, ranks = communicator.mapping.rank, communicator.mapping.world_size
        num_blocks = MAX_ONE_SHOT // (BLOCK_WORDS * WORD_BYTES)
        num_chunks = -(-max(SIZES) // (ranks * PART_WORDS * WORD_BYTES))
        of_lines = RankLines.num_bytes(ranks, num_blocks * BLOCK_WORDS)
        of_parts = RankParts.num_bytes(ranks, num_chunks)
        self._memory = PeerMemory(of_lines + of_parts, device, communicator)
        addresses = torch.tensor(self._memory.addresses, device=device)
        counts = torch.zeros(num_blocks, dtype=torch.int32, device=device)
        self._lines = lines = RankLines(rank, addresses, counts)
        parts = RankParts(rank, addresses + of_lines, counts.new_zeros(num_chunks))
        self.ways: dict[str, PeerSum] = {
            "one-shot": PeerSum(lambda *tensors: rank_sum(lines, *tensors), lines.capacity),
            "two-shot": PeerSum(lambda *tensors: two_shot_sum(parts, *tensors), parts.capacity),
        }

    def best_offers(self, offers: torch.Tensor) -> torch.Tensor:
        """As `Communicator.best_offers`."""
        return rank_best(self._lines, offers.contiguous())

    def close(self) -> None:
        self._memory.close()
