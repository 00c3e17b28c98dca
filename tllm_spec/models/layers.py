"""Norms and activation in as few ops as torch allows. Nothing here knows sequences or caches."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from tllm_spec.models.module import Module, Placement, WeightSlot, sibling


class Embedding(Module):
    """Token ids to rows; every rank has all of it."""

    def __init__(self, num_embeddings: int, size: int, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(num_embeddings, size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.weight)


class RMSNorm(Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, placement: Placement) -> None:
        super().__init__()
        self.weight = placement.parameter(size)
        self.size = size
        self.eps = eps
        self.eps_tensor = torch.tensor(eps, dtype=torch.float32, device=placement.device)
        # On a CPU F.rms_norm is a chain of eight ops; the five below take two thirds of its time.
        self.fused = placement.device.type != "cpu" or placement.dtype != torch.float32

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused:
            return F.rms_norm(x, (self.size,), self.weight, self.eps)
        return torch.mul(x, self.weight).div_(torch.linalg.vector_norm(x, 2, -1, True).hypot_(self.eps_tensor))

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place, then normalise the sum."""
        return self.forward(residual.add_(x))


class HeadNorm(Module):
    """RMSNorm over each head of q and k, `[T, Hq + Hkv, D]`, in place; q's and k's weights side by side."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weight = placement.parameter(num_heads + num_kv_heads, head_dim)
        self.eps_tensor = torch.tensor(eps, dtype=torch.float32, device=placement.device)

    def forward(self, heads: torch.Tensor) -> None:
        heads.mul_(inverse_rms(heads, self.eps_tensor)).mul_(self.weight)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """One `[D]` tensor of the checkpoint fills the rows of all its heads."""
        shape = (self.weight.shape[1],)
        yield f"{sibling(path, 'q_norm')}.weight", WeightSlot(self.weight[: self.num_heads], shape)
        yield f"{sibling(path, 'k_norm')}.weight", WeightSlot(self.weight[self.num_heads :], shape)


def inverse_rms(x: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
    """`1 / sqrt(mean(x^2) + eps)` in float32, `[..., 1]`."""
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of the fused `[T, 2 * I]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
