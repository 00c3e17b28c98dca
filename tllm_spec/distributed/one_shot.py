"""Sums of small tensors in one step: every rank writes into the other ranks' memory, and adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tllm_spec.distributed.peer_memory import PeerMemory
from tllm_spec.kernels.rank_lines import BLOCK_WORDS, WORD_BYTES, RankLines
from tllm_spec.kernels.rank_sum import rank_sum, serves

if TYPE_CHECKING:
    from tllm_spec.distributed.communicator import Communicator


class OneShotSum:
    """Sums of tensors of at most `max_bytes` on `device`. Every rank makes one, and closes it, at
    the same time.

    Raises NoPeerMemory on all ranks where the devices cannot write each other's memory."""

    def __init__(self, max_bytes: int, device: torch.device, communicator: Communicator) -> None:
        mapping = communicator.mapping
        blocks = -(-max_bytes // (BLOCK_WORDS * WORD_BYTES))
        num_bytes = RankLines.num_bytes(mapping.world_size, blocks * BLOCK_WORDS)
        self._memory = PeerMemory(num_bytes, device, communicator)
        self._lines = RankLines(
            mapping.rank,
            torch.tensor(self._memory.addresses, device=device),
            torch.zeros(blocks, dtype=torch.int32, device=device),
        )

    def serves(self, values: torch.Tensor) -> bool:
        return serves(self._lines, values)

    def __call__(self, values: torch.Tensor, add_to: torch.Tensor | None = None) -> None:
        if add_to is None or add_to.is_contiguous():
            rank_sum(values, self._lines, add_to)
        else:
            rank_sum(values, self._lines)
            add_to.add_(values)

    def close(self) -> None:
        self._memory.close()
