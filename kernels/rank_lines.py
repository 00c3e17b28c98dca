"""The memory in which ranks write each other's values (rank_sum.py).

What is written are lines of 8 bytes: 4 bytes of values, and the number of the sum. A line is
written and read as a whole, so a reader that finds the number has the values, and needs no fence
and no other signal (NCCL calls this protocol LL). The number is a count in device memory, so that
replays of a CUDA graph go on counting. Two buffers take turns. A rank that is in its sum n has
received all lines of sum n - 1 from every other rank, and these ended sum n - 2 before they sent
them. So the buffer of sum n - 2 can be overwritten, without waiting.

A block of a sum waits for the others' block of the same index only, whose lines are sent before
anything waits. The number wraps after 2^32 sums, so a line is mistaken for a new one only if it was
last written exactly so many sums ago."""

from dataclasses import dataclass

import torch

BLOCK_WORDS = 256  # two for each thread, whose lines are one store of 16 bytes
WORD_BYTES = 4
LINE_BYTES = 8


@dataclass(frozen=True)
class RankLines:
    """One rank's view of the memory that lines are written to. For each rank it is `[2, ranks,
    capacity]` int64, all 0 before the first sum: buffer, rank that writes, line. `addresses`:
    `[ranks]` int64, where each rank's memory is for this rank. `counts`: `[capacity / BLOCK_WORDS]`
    int32, sums so far of each block, 0 before the first; of this rank."""

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor

    @property
    def capacity(self) -> int:
        """The most words of a sum."""
        return self.counts.numel() * BLOCK_WORDS

    @staticmethod
    def num_bytes(ranks: int, capacity: int) -> int:
        """Bytes that each rank's memory needs."""
        return 2 * ranks * capacity * LINE_BYTES
