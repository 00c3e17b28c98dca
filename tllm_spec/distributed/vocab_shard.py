"""The columns of logits that one rank has, and two ways to a token of all columns: gather them, or
exchange each rank's best one."""

from dataclasses import dataclass

import torch

from tllm_spec.distributed.communicator import Communicator


@dataclass(frozen=True)
class VocabShard:
    """One rank's columns of the logits: those from `first` on, as many as every rank has:
    `size`."""

    communicator: Communicator
    first: int
    size: int

    @property
    def num_columns(self) -> int:
        """Columns of all ranks together."""
        return self.size * self.communicator.mapping.tp_size

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """`[R, size]` to `[R, num_columns]`."""
        return self.communicator.all_gather(logits)

    def best(self, offers: torch.Tensor) -> torch.Tensor:
        """The best column of all ranks' offers `[R, 2]` int32 (`offer_token`), `[R]` int64: 8 bytes
        are sent for each row. As `rank_best`."""
        return self.communicator.best_offers(offers)
