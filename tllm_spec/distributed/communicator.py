"""The messages between the ranks of a model: plain data for hosts, tensors for devices.

No message can make the other side run code: plain data is msgpack, never pickle."""

from collections.abc import Callable
from typing import Any

import torch

from tllm_spec.distributed.mapping import SINGLE_RANK, Mapping
from tllm_spec.kernels.parallel.rank_sum import rank_best_reference


class Communicator:
    """What ranks send each other. This class is the single rank: nothing is sent. Every method is
    collective: all ranks call the same ones in the same order."""

    mapping: Mapping = SINGLE_RANK
    captures = True
    """Whether a CUDA graph can hold what tensors are sent by. Known after `join`."""
    ranks_on_device = 1
    """Ranks, this one included, that use this rank's CUDA device, or run on the CPU of its host.
    Known after `join`."""

    def broadcast(self, message: bytes) -> bytes:
        """Rank 0's message; the others' argument is ignored."""
        return message

    def share(self, value: Any) -> Any:
        """Rank 0's value, of msgpack's types; the others' argument is ignored."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, of msgpack's types, by rank: on every rank."""
        return [value]

    def all_say(self, text: str) -> bool:
        """Whether all ranks call this with the same text within seconds. After an error, when the
        other ranks may be anywhere."""
        return True

    def minimum(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return number

    def all_reduce(self, values: torch.Tensor) -> None:
        """The sum of all ranks' values, in place: the same bits on every rank. Enqueued on the
        current stream; a CUDA graph can hold it."""

    def all_reduce_into(self, total: torch.Tensor, values: torch.Tensor) -> None:
        """Adds the sum of all ranks' values to `total` in place. `values` is scratch afterwards. As
        `all_reduce`."""
        self.all_reduce(values)
        total.add_(values)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """`[R, N]` of each rank, side by side in the order of the ranks, `[R, tp_size * N]`. As
        `all_reduce`."""
        return values

    def best_offers(self, offers: torch.Tensor) -> torch.Tensor:
        """`rank_best` of all ranks' offers. As `all_reduce`."""
        return rank_best_reference(self.all_gather(offers).view(len(offers), -1, 2))

    def join(self, device: torch.device) -> None:
        """Connects the devices; before it only plain data can be sent."""

    def before_close(self, release: Callable[[], None]) -> None:
        """`release` is called by `close` first. CUDA graphs that hold collectives must be released
        there: NCCL waits for them, so the ranks could not shut down."""

    def close(self) -> None:
        """Ends the connections between the ranks."""

    def when_lost(self, tell: Callable[[str], None]) -> None:
        """`tell` is called before the process ends because another rank's has ended, with the
        reason."""

    def abort(self, reason: str) -> None:
        """Ends this process and so all ranks', after a failure that the other ranks do not know
        of."""


SINGLE = Communicator()
