"""Embedding and norms."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from tllm_spec.kernels.attention.rotary_write import HeadWeights
from tllm_spec.kernels.gemm.norms import NormWeight, rms_norm
from tllm_spec.kernels.slots.row_copies import gather_rows, gather_slice_rows
from tllm_spec.models.module import Module, Placement, StoredWeight, WeightSlot, sibling


class Embedding(Module):
    """Token ids to rows. Vocabulary-parallel: each rank has a slice of the rows, and a lookup sums
    over the ranks, exactly, since all ranks but one add 0.

    Raises ValueError if the rows cannot be split evenly over the ranks."""

    def __init__(self, num_embeddings: int, size: int, placement: Placement) -> None:
        super().__init__()
        mapping = placement.mapping
        local = mapping.shard(num_embeddings, "vocab_size")
        self.num_embeddings, self.first = num_embeddings, local * mapping.tp_rank
        self.is_sharded = mapping.tp_size > 1
        self.communicator = placement.communicator
        self.weight = placement.parameter(local, size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[T]` to `[T, H]`."""
        if not self.is_sharded:
            return gather_rows(self.weight, input_ids)
        rows = gather_slice_rows(self.weight, input_ids, self.first)
        self.communicator.all_reduce(rows)
        return rows

    def lookup(self, input_ids: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Ids and table for `draft_input`, which gathers rows itself where this rank has all."""
        return (None, self.forward(input_ids)) if self.is_sharded else (input_ids, self.weight)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        shape = (self.num_embeddings, self.weight.shape[1])
        yield f"{path}.weight", WeightSlot(self.weight, shape, 0, self.first)


class RMSNorm(Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.size = size
        self.eps = eps
        self.kernel_weight = NormWeight(self.weight, eps)
        self.scaled_weight: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scaled_weight is None:
            return rms_norm(x, self.weight, self.eps)
        root = torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.root_eps)
        return torch.mul(x, self.scaled_weight).div_(root)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the norm of x `[T, H]` to `total` `[T, H]`, in place."""
        if self.scaled_weight is None:
            rms_norm(x, self.weight, self.eps, total)
        else:
            total.add_(self.forward(x))

    def specialize_for_cpu(self) -> None:
        """On a CPU F.rms_norm is eight ops. These four take half the time; with n = size:
        `x * (weight * sqrt(n)) / hypot(|x|, sqrt(n * eps))`."""
        self.scaled_weight = self.weight * self.size**0.5
        self.root_eps = torch.tensor((self.size * self.eps) ** 0.5)


@dataclass(frozen=True)
class OffsetSlot(WeightSlot):
    """A norm's weight, of which the checkpoint has the difference from 1."""

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        assert isinstance(tensor, torch.Tensor)  # norms are not quantised
        super().load(tensor.float() + 1)


def in_float32(placement: Placement) -> Placement:
    """The placement of norms' weights that are stored as differences from 1: in 16 bits the sum
    would lose half of their digits."""
    return replace(placement, dtype=torch.float32)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm with the weight 1 + w in float32, for the checkpoint's w."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__(size, eps, in_float32(placement))

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{path}.weight", OffsetSlot(self.weight, (self.size,))


class HeadNorm(Module):
    """RMSNorm over each head of q and k, applied by the attention backend. The weights of q's heads
    are followed by those of k's. `order`: `[D]` int64, the checkpoint's element for each one; None:
    the same."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.order: torch.Tensor | None = None
        self.weight = placement.parameter(num_heads + num_kv_heads, head_dim)
        self.head_weights = HeadWeights(self.weight, eps)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """One `[D]` tensor of the checkpoint fills the rows of all heads of q, another those of
        k."""
        shape, order = (self.weight.shape[1],), self.order
        parts = self.weight[: self.num_heads], self.weight[self.num_heads :]
        for name, own in zip(("q_norm", "k_norm"), parts, strict=True):
            yield f"{sibling(path, name)}.weight", WeightSlot(own, shape, order=order)


class OffsetHeadNorm(HeadNorm):
    """Head norm with weights 1 + w in float32, for the checkpoint's w."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, placement: Placement
    ) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, eps, in_float32(placement))

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, slot in super().slots(path):
            yield name, OffsetSlot(slot.destination, slot.shape, order=slot.order)
