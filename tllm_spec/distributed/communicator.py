"""A rank's place among the ranks, what they send each other, and their shares of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tllm_spec.kernels.parallel.rank_sum import rank_best_reference

# One rank's place in the parallel layout, as numbers: no process group and no device.


@dataclass(frozen=True)
class Mapping:
    """A rank's place. Tensor-parallel groups are runs of `tp_size` neighbouring ranks. In a layer
    of experts, a group is `ep_size` runs, each of which has a part of the experts. `LlmArgs` has
    checked that the numbers fit together."""

    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size
        assert self.world_size % self.tp_size == self.tp_size % self.ep_size == 0

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def ep_rank(self) -> int:
        """Which part of the experts this rank has."""
        return self.tp_rank // self.moe_tp_size

    @property
    def moe_tp_size(self) -> int:
        """Ranks that share an expert, each with a slice of it."""
        return self.tp_size // self.ep_size

    @property
    def moe_tp_rank(self) -> int:
        return self.tp_rank % self.moe_tp_size

    def shard_experts(self, num_experts: int) -> int:
        """This rank's experts. Raises ValueError if `ep_size` does not divide their number."""
        return _part(num_experts, "num_experts", self.ep_size, "moe_expert_parallel_size")

    def shard_expert(self, size: int) -> int:
        """This rank's part of an expert's intermediate size. Raises ValueError as `shard`."""
        ranks = self.moe_tp_size
        return _part(size, "moe_intermediate_size", ranks, "moe_tensor_parallel_size")

    def shard_kv_heads(self, num_kv_heads: int) -> int:
        """This rank's key and value heads. With more ranks than heads several ranks have the same
        one.

        Raises:
            ValueError: neither number divides the other.
        """
        if self.tp_size % num_kv_heads == 0:
            return 1
        return self.shard(num_kv_heads, "num_key_value_heads")

    def shard(self, size: int, what: str) -> int:
        """This rank's part of `size`; `what` names the size in the error.

        Raises:
            ValueError: `size` cannot be split evenly over the tensor-parallel ranks.
        """
        return _part(size, what, self.tp_size, "tensor_parallel_size")


def _part(size: int, what: str, ranks: int, option: str) -> int:
    if size % ranks:
        raise ValueError(f"{what} is {size}, which {option} {ranks} does not divide.")
    return size // ranks


SINGLE_RANK = Mapping()


# The messages between the ranks of a model: plain data for hosts, tensors for devices.
#
# No message can make the other side run code: plain data is msgpack, never pickle.


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
        return int(min(self.gather(number)))

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
        """The best column of all ranks' offers `[R, 2]` int32 (`offer_token`), `[R]` int64: 8 bytes
        are sent for each row. As `rank_best` and `all_reduce`."""
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


# Sums and gathers of tensors over torch.distributed's group of all ranks.


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


# The columns of logits that one rank has, and two ways to a token of all columns: gather them, or
# exchange each rank's best one.


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
