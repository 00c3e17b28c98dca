"""Sums of small tensors in one step: every rank writes into the other ranks' memory, and adds. The
memory is torch's symmetric memory, without NVLink multicast."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from tllm_spec.kernels.rank_lines import BLOCK_WORDS, WORD_BYTES, RankLines
from tllm_spec.kernels.rank_sum import rank_sum, serves


class OneShotSum:
    """Sums of tensors of at most `max_bytes` on `device`. Every rank makes one, at the same time.

    Raises RuntimeError where the devices cannot write each other's memory, ImportError or
    AttributeError in a torch without this."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed._symmetric_memory as symmetric_memory

        group, ranks = dist.group.WORLD, dist.get_world_size()
        assert group is not None
        blocks = -(-max_bytes // (BLOCK_WORDS * WORD_BYTES))
        num_bytes = RankLines.num_bytes(ranks, blocks * BLOCK_WORDS)
        self._memory = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        rank, starts = dist.get_rank(), symmetric_memory.rendezvous(self._memory, group).buffer_ptrs
        offset = self._memory.data_ptr() - starts[rank]  # in the allocation: the same on all ranks
        self._lines = RankLines(
            rank,
            torch.tensor([start + offset for start in starts], device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
        )
        self._memory.zero_()
        dist.barrier()  # before another rank writes

    def serves(self, values: torch.Tensor) -> bool:
        return serves(self._lines, values)

    def __call__(self, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
        if add_to is None or add_to.is_contiguous():
            rank_sum(values, self._lines, add_to)
        else:
            rank_sum(values, self._lines)
            add_to.add_(values)
