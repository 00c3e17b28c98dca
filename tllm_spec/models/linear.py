"""Linear layers of one tensor-parallel rank, and the checkpoint tensors that they fuse.

Each holds one rank's shard. Row-parallel layers sum over the ranks.
"""

import platform
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn

from tllm_spec.distributed.vocab_shard import VocabShard
from tllm_spec.kernels.batch_invariant_linear import batch_invariant_linear
from tllm_spec.kernels.scaled_linear import dequantised, scaled_linear
from tllm_spec.kernels.silu_and_mul import silu_and_mul
from tllm_spec.kernels.small_m_gemm import serves, small_m_gemm
from tllm_spec.kernels.tuned_linear import TunedGemms, tuned_linear
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.module import Module, Placement, WeightSlot, sibling

# For smaller weights oneDNN's fixed cost of a call exceeds what it saves.
MIN_PACKED_ELEMENTS = 1 << 19
PACKED_ROWS_HINT = 8


class Linear(Module):
    """`y = x W^T + b`, and the forms that fuse a norm, SwiGLU or the residual addition.

    A weight in FP8 has `weight_scales` (scaled_linear.py).

    On a CPU, weights with more outputs than inputs and small weights are stored column-major: up to
    twice as fast for one row, and faster for the few rows of a verified window. For a large weight
    `specialize_for_cpu` adds a copy in oneDNN's blocked layout, which is faster than BLAS for
    several rows and doubles the memory."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        placement: Placement,
        weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.mapping = placement.dtype, placement.mapping
        self.communicator = placement.communicator
        self.batch_invariant = placement.batch_invariant
        self.shares_weight = weight is not None
        if weight is None:
            by_columns = placement.device.type == "cpu" and not placement.batch_invariant
            fits = out_features >= in_features or out_features * in_features < MIN_PACKED_ELEMENTS
            weight, self.weight_scales = placement.matrix(
                out_features, in_features, column_major=by_columns and fits
            )
        else:
            self.weight_scales = None
        self.weight = weight
        self.bias = placement.parameter(out_features) if bias else None
        self.matrix = self.weight.t()
        self.packed: torch.Tensor | None = None
        # On CUDA, the GEMM algorithms that are faster than torch's choice (linear_tuning.py).
        self.tuned_gemms: TunedGemms | None = None

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """`[T, K]` to `[T, N]`, of `norm(x)` if there is a norm."""
        if self._is_fused(x):
            return self._fused(x, norm)
        return self._gemm(x if norm is None else norm.forward(x))

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """SwiGLU of `norm(x)`, `[T, K]` to `[T, N / 2]`: the SiLU of the first half of the outputs
        times the second half. Without a norm, of x."""
        if self._is_fused(x):
            return self._fused(x, norm, gated=True)
        return silu_and_mul(self._gemm(x if norm is None else norm.forward(x)))

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the outputs for x `[T, K]` to `total` `[T, N]`, in place."""
        if self._is_fused(x):
            self._fused(x, add_to=total)
        elif self.weight_scales is not None:
            self._scaled(x, self.weight_scales, total)
        elif self.tuned_gemms is not None:
            tuned_linear(x, self.weight, self.tuned_gemms, bias=self.bias, add_to=total)
        elif total.is_cuda and self.bias is None and not self.batch_invariant:
            total.addmm_(x, self.matrix)
        else:
            total.add_(self._gemm(x))

    def _is_fused(self, x: torch.Tensor) -> bool:
        return not self.batch_invariant and serves(x, self.weight)

    def _scaled(
        self, x: torch.Tensor, scales: torch.Tensor, add_to: torch.Tensor | None = None
    ) -> torch.Tensor:
        is_invariant = self.batch_invariant
        return scaled_linear(
            x, self.weight, scales, self.bias, add_to=add_to, invariant=is_invariant
        )

    def _fused(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        *,
        gated: bool = False,
        add_to: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return small_m_gemm(
            x,
            self.weight,
            scales=self.weight_scales,
            bias=self.bias,
            norm=None if norm is None else norm.kernel_weight,
            gated=gated,
            add_to=add_to,
        )

    def _gemm(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight_scales is not None:
            return self._scaled(x, self.weight_scales)
        if self.batch_invariant:
            return batch_invariant_linear(x, self.weight, self.bias)
        if self.tuned_gemms is not None:
            return tuned_linear(x, self.weight, self.tuned_gemms, bias=self.bias)
        if self.packed is not None and x.shape[0] > 1:
            output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.packed, self.bias, "none", [], ""
            )
            return output
        return x.mm(self.matrix) if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def widen(self, placement: Placement) -> None:
        self.weight_scales = None
        self.weight = placement.parameter(*self.weight.shape)
        self.matrix = self.weight.t()

    def full_weight(self) -> torch.Tensor:
        """`[N, K]`, dequantised."""
        if self.weight_scales is None:
            return self.weight
        return dequantised(self.weight, self.weight_scales, self.dtype)

    def specialize_for_cpu(self) -> None:
        if self.batch_invariant or self.weight_scales is not None:
            return  # its kernel reads the row-major weight
        weight = self.weight.detach()
        if weight.is_contiguous() and weight.shape[0] > weight.shape[1]:
            # The weight is shared with an embedding, so it is not column-major itself.
            self.matrix = weight.t().contiguous()
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        has_onednn = is_x86 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        if has_onednn and weight.numel() >= MIN_PACKED_ELEMENTS:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(
                weight.contiguous(), PACKED_ROWS_HINT
            )


class ColumnLinear(Linear):
    """Column-parallel: each rank has a slice of the outputs of every part. `parts`: the names of
    the fused checkpoint tensors, with their full output sizes. `copies`: parts of which so many
    neighbouring ranks have the same slice. `weight`: a parameter to share."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        *,
        bias: bool,
        placement: Placement,
        weight: nn.Parameter | None = None,
        copies: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        local = {
            name: placement.mapping.shard(size * copies.get(name, 1), f"the output of {name}")
            for name, size in parts.items()
        }
        super().__init__(
            in_features, sum(local.values()), bias=bias, placement=placement, weight=weight
        )
        self.parts, self.copies = local, copies

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """None for a shared weight, which the other module loads."""
        if self.shares_weight:
            return
        first = 0
        for name, size in self.parts.items():
            own, copies = slice(first, first + size), self.copies.get(name, 1)
            full, start = size * self.mapping.tp_size // copies, self.mapping.tp_rank // copies
            scales = None if self.weight_scales is None else self.weight_scales[own]
            shape = (full, self.weight.shape[1])
            slot = WeightSlot(self.weight[own], shape, 0, size * start, scales=scales)
            yield f"{sibling(path, name)}.weight", slot
            if self.bias is not None:
                slot = WeightSlot(self.bias[own], (full,), 0, size * start)
                yield f"{sibling(path, name)}.bias", slot
            first += size


class OutputLinear(ColumnLinear):
    """A column-parallel output layer. `shard`: the logits that this rank has; None: all of them.
    `tied`: the weight of an embedding, which it shares: this rank's rows."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        placement: Placement,
        tied: nn.Parameter | None = None,
    ) -> None:
        super().__init__(
            in_features,
            {"lm_head": out_features},
            bias=False,
            placement=placement.wide,
            weight=tied,
        )
        mapping = placement.mapping
        self.shard: VocabShard | None = None
        if mapping.tp_size > 1:
            size = self.parts["lm_head"]
            self.shard = VocabShard(placement.communicator, size * mapping.tp_rank, size)


class RowLinear(Linear):
    """Row-parallel: each rank has a slice of the inputs, and the outputs of all ranks are summed.
    Rank 0 adds the bias."""

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, placement: Placement
    ) -> None:
        local = placement.mapping.shard(in_features, "the input of a row-parallel layer")
        first_rank = placement.mapping.tp_rank == 0
        placement = placement.of_inputs(local, in_features)
        super().__init__(local, out_features, bias=bias and first_rank, placement=placement)
        self.has_bias = bias

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """As `Linear.add_to`, for the sum of all ranks."""
        if self.mapping.tp_size == 1:
            super().add_to(total, x)
            return
        self.communicator.all_reduce_into(total, self.forward(x))

    def add_part_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """As `add_to`, of this rank only: the caller sums over the ranks."""
        super().add_to(total, x)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        out_features, local = self.weight.shape
        shape = (out_features, local * self.mapping.tp_size)
        start, scales = local * self.mapping.tp_rank, self.weight_scales
        yield f"{path}.weight", WeightSlot(self.weight, shape, 1, start, scales=scales)
        if self.has_bias:
            yield f"{path}.bias", WeightSlot(self.bias, (out_features,))
