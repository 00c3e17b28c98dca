"""Sums and gathers of tensors over torch.distributed's group of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class Collectives:
    """Collective operations on tensors where they are: NCCL on CUDA, gloo on a CPU. Enqueued on the
    current stream."""

    captures = True  # in a CUDA graph

    def all_reduce(self, values: torch.Tensor) -> None:
        dist.all_reduce(values)

    def all_reduce_into(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """Adds the sum of all ranks' values to `total`. `values` is scratch afterwards."""
        self.all_reduce(values)
        total.add_(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """`[R, N]` of each rank as `[ranks, R, N]`."""
        number, (rows, columns) = dist.get_world_size(), values.shape
        gathered = values.new_empty((number * rows, columns))
        _all_gather(gathered, values.contiguous())
        return gathered.view(number, rows, columns)


class ThroughHost(Collectives):
    """The same for ranks that share a CUDA device, which NCCL refuses: gloo over copies on the
    host. Waits for the device."""

    captures = False

    def all_reduce(self, values: torch.Tensor) -> None:
        host = values.cpu()
        super().all_reduce(host)
        values.copy_(host)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        return super().all_gather(values.cpu()).to(values.device)


# Its name since torch 2.13, and before.
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
