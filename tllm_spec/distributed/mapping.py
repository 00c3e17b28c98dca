"""One rank's place in the parallel layout, as numbers: no process group and no device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mapping:
    """A rank's place. Tensor-parallel groups are runs of `tp_size` neighbouring ranks. In a layer
    of experts, a group is `ep_size` runs, each of which has a part of the experts.

    Raises:
        ValueError: the numbers do not fit together.
    """

    rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(
                f"rank is {self.rank}; world_size {self.world_size} has ranks 0 to "
                f"{self.world_size - 1}."
            )
        if self.tp_size < 1 or self.world_size % self.tp_size:
            raise ValueError(
                f"tp_size is {self.tp_size}; it must divide world_size, which is {self.world_size}."
            )

        if self.ep_size < 1 or self.tp_size % self.ep_size:
            raise ValueError(
                f"moe_expert_parallel_size is {self.ep_size}; it must divide tensor_parallel_size, "
                f"which is {self.tp_size}."
            )

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

    def copies_of_kv_heads(self, num_kv_heads: int) -> int:
        """Ranks that have the same key and value head."""
        return max(self.tp_size // num_kv_heads, 1)

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
