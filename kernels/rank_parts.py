"""The memory in which ranks write each other's parts of values, and their sums (two_shot_sum.py).

A chunk has a part for each rank. Parts are written as they are, half the bytes of lines
(rank_lines.py). A flag says that they are there: the writer raises it once they have arrived.

Flags are the number of the chunk's sum, a count in device memory, so that replays of a CUDA graph
go on counting. One buffer is enough. A rank that sends values of sum n has received all parts of
the chunk's sum n - 1, which the others sent after they had read its values. A rank that sends the
sum n of its part has received values from all others, which they sent after sum n - 1. A program
waits only for the other ranks' program of the same index, which sends before it waits."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.rank_lines import WORD_BYTES

PART_WORDS = 512  # of a rank in a chunk: four for each thread, which are one store of 16 bytes
FLAG_BYTES = 4


@dataclass(frozen=True)
class RankParts:
    """One rank's view of the memory that parts are written to. For each rank it is `[2, chunks,
    ranks, PART_WORDS]` int32, values and then sums, and `[2, chunks, ranks]` int32, their flags,
    all 0 before the first sum; the index of a rank is that of the writer. `addresses`: `[ranks]`
    int64, where each rank's memory is for this rank. `counts`: `[chunks]` int32, sums so far of
    each chunk, 0 before the first; of this rank."""

    rank: int
    addresses: torch.Tensor
    counts: torch.Tensor

    @property
    def capacity(self) -> int:
        """The most words of a sum."""
        return self.counts.numel() * self.addresses.numel() * PART_WORDS

    @staticmethod
    def num_bytes(ranks: int, chunks: int) -> int:
        """Bytes that each rank's memory needs."""
        return 2 * chunks * ranks * (PART_WORDS * WORD_BYTES + FLAG_BYTES)
