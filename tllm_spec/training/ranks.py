"""The processes of a training run, started by `torchrun`: each has a device and a share of every
batch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: str) -> "tuple[Ranks, torch.device]":
        """This process's place, and its own device of the kind `device`."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return ALONE, torch.device(device)
        own = torch.device(device)
        if own.type == "cuda":
            own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(own)
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
        return cls(dist.get_rank(), size), own

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def share(self) -> slice:
        """This rank's sequences of a batch."""
        return slice(self.rank, None, self.size)

    def add_up(self, loss: Tensor, gradients: Sequence[Tensor]) -> Tensor:
        """The sum of the ranks' losses; gradients become their sums, in place."""
        if self.size == 1:
            return loss
        flat = torch.cat([loss.reshape(1), *(each.flatten() for each in gradients)])
        dist.all_reduce(flat)
        sizes = [each.numel() for each in gradients]
        for gradient, total in zip(gradients, torch.split(flat[1:], sizes), strict=True):
            gradient.copy_(total.view_as(gradient))
        return flat[0]

    def of_first(self, value: float, device: torch.device) -> float:
        """The first rank's value."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        return shared.item()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()


ALONE = Ranks()
