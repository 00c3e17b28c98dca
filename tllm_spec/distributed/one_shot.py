"""Sums of small tensors in one step: every rank reads the other ranks' memory and adds, which costs
one exchange of signals instead of NCCL's steps. From torch's symmetric memory, without NVLink
multicast."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT = 16  # bytes that a thread reads at a time


class OneShotSum:
    """Sums of tensors of at most `max_bytes` on `device`. Every rank makes one, at the same time.

    Raises RuntimeError where the devices cannot read each other's memory, ImportError or
    AttributeError in a torch without this."""

    def __init__(self, max_bytes: int, device: torch.device) -> None:
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed._symmetric_memory as symmetric_memory

        self.max_bytes, group = max_bytes, dist.group.WORLD
        assert group is not None
        self._group = group.group_name
        self._buffer = symmetric_memory.empty(max_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._buffer, group)
        self._sum = torch.ops.symm_mem.one_shot_all_reduce_out

    def serves(self, values: torch.Tensor) -> bool:
        num_bytes = values.numel() * values.element_size()
        fits = 0 < num_bytes <= self.max_bytes and num_bytes % ALIGNMENT == 0
        is_aligned = values.is_contiguous() and values.data_ptr() % ALIGNMENT == 0
        return fits and is_aligned and values.dtype in DTYPES

    def __call__(self, values: torch.Tensor) -> None:
        """The sum of all ranks' values in place, added in the order of the ranks: the same bits on
        each."""
        own = self._buffer.view(values.dtype)[: values.numel()].view(values.shape)
        own.copy_(values)
        self._sum(own, "sum", self._group, values)
