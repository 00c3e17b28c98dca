"""What ranks exchange in one kernel that writes into the other ranks' memory: one-shot sums, where
every rank adds all values, two-shot sums, where each adds a part, and offered tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tllm_spec.distributed.peer_memory import PeerMemory
from tllm_spec.distributed.sum_choice import SIZES, Sum
from tllm_spec.kernels.parallel.rank_sum import (
    BLOCK_WORDS,
    WORD_BYTES,
    RankLines,
    rank_best,
    rank_sum,
    serves,
)
from tllm_spec.kernels.parallel.two_shot_sum import PART_WORDS, RankParts, two_shot_sum

if TYPE_CHECKING:
    from tllm_spec.distributed.communicator import Communicator

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
        self.ways: dict[str, Sum] = {
            "one-shot": PeerSum(lambda *tensors: rank_sum(lines, *tensors), lines.capacity),
            "two-shot": PeerSum(lambda *tensors: two_shot_sum(parts, *tensors), parts.capacity),
        }

    def best_offers(self, offers: torch.Tensor) -> torch.Tensor:
        """As `Communicator.best_offers`."""
        return rank_best(self._lines, offers.contiguous())

    def close(self) -> None:
        self._memory.close()


class PeerSum:
    """`Sum` by a kernel, of at most `capacity` words. `kernel`: gets the values and, if it is to
    add their sum to another tensor, that one."""

    def __init__(self, kernel: Callable[..., None], capacity: int) -> None:
        self._kernel, self._capacity = kernel, capacity
        self.max_bytes = capacity * WORD_BYTES

    def serves(self, values: torch.Tensor) -> bool:
        return serves(values, self._capacity)

    def __call__(self, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
        if add_to is None or add_to.is_contiguous():
            self._kernel(values, add_to)
        else:
            self._kernel(values)
            add_to.add_(values)
