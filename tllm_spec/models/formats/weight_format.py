"""The interface of a weight format: how the weight of a linear layer is kept on a device, filled
from a checkpoint, and multiplied. A format is one file that implements it."""

import platform
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tllm_spec.kernels.gemm.batch_invariant_linear import batch_invariant_linear
from tllm_spec.kernels.gemm.norms import silu_and_mul
from tllm_spec.kernels.gemm.small_m_gemm import serves, small_m_gemm
from tllm_spec.kernels.gemm.tuned_linear import TunedGemms, tuned_linear
from tllm_spec.models.layers import Placement, RMSNorm, WeightSlot


@dataclass(frozen=True)
class Part:
    """A checkpoint's matrix `[N, K]`, and the slice of it that this rank's layer has."""

    shape: tuple[int, int]
    """The shape of the whole matrix."""
    shard_dim: int | None = None
    """0: the slice has some outputs; 1: some inputs; None: it has all."""
    start: int = 0
    order: torch.Tensor | None = None
    """int64, on the host: the slice's rows in the order of the layer's; None: the same."""


Rows = slice | tuple[int, slice]
"""Outputs of a layer, of experts after the expert's index on this rank."""


class WeightFormat(ABC):
    """The weight of one linear layer on one rank, `y = x W^T + b`: its tensors and its GEMMs. Or
    those of E experts, `[E, N, K]`, whose GEMMs are those of `StackedWeight`.

    A result has the same arithmetic for any number of rows, unless the format's documentation says
    otherwise."""

    weight: nn.Parameter
    """`[N, K]`, or the packed codes of 4-bit weights."""
    scales: nn.Parameter | None = None
    """Scales of quantised weights: float32 `[N, ceil(K / 128)]` or `[N, 1]` in FP8, `group_words`
    of 4 bits."""
    group: int = 0
    """Inputs that share a scale of 4-bit weights."""
    bias: nn.Parameter | None

    @property
    def base(self) -> "WeightFormat":
        """The format of the layer's own weight, to whose results another may add (adapters)."""
        return self

    @property
    def acts(self) -> bool:
        """Whether results are not those of `base` alone."""
        return False

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs of this rank's layer."""
        out_features, in_features = self.weight.shape
        return out_features, in_features

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What the layer registers, with names."""
        yield "weight", self.weight
        if self.scales is not None:
            yield "weight_scales", self.scales

    @abstractmethod
    def slot(self, module: str, rows: Rows | None, part: Part) -> WeightSlot:
        """Where the matrix of the checkpoint's `module` goes, which fills `rows`; None: another
        rank has them. A slot also says which types and shape a tensor has."""

    @abstractmethod
    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, K]` to `[T, N]`."""

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        """`multiply` of `norm(x)` if there is a norm."""
        return self.multiply(x if norm is None else norm.forward(x))

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """`multiply` of 16 bits with results in float32, of a weight that is not quantised, without
        bias."""
        if x.is_cuda:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        return x.float().mm(self.weight.float().t())

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None, **gates: Any) -> torch.Tensor:
        """SwiGLU of `norm(x)`, `[T, K]` to `[T, N / 2]`: the SiLU of the first half of the outputs
        times the second half. Without a norm, of x. gates: options of `silu_and_mul`."""
        return silu_and_mul(self.forward(x, norm), **gates)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None = None) -> None:
        """Write `forward` to `out` `[T, N]`, any stride between rows."""
        out.copy_(self.forward(x, norm))

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """Add the outputs for x `[T, K]` to `total` `[T, N]`, in place."""
        total.add_(self.multiply(x))

    def add_gated_to(
        self, total: torch.Tensor, gate_up: "WeightFormat", x: torch.Tensor, norm: RMSNorm | None
    ) -> None:
        """`add_to` for `gate_up.gated(x, norm)`, which may be fused."""
        self.add_to(total, gate_up.gated(x, norm))

    def fuses_norm(self, x: torch.Tensor) -> bool:
        """Whether `forward` of x `[T, K]` rounds otherwise than `multiply` of its norm."""
        return False

    @abstractmethod
    def full_weight(self) -> torch.Tensor:
        """`[N, K]` in the model's dtype."""


class FewRowsFormat(WeightFormat):
    """Up to 8 rows on CUDA run `small_m_gemm`, which fuses norm, SwiGLU and the addition, unless
    each row must have the same bits in every batch (`is_invariant`)."""

    is_invariant = False

    def fuses_norm(self, x: torch.Tensor) -> bool:
        return self._are_few(x)

    def fuses_adapters(self, x: torch.Tensor) -> bool:
        """Whether `few_rows` serves x `[T, K]`, with adapters."""
        return self._are_few(x)

    def _are_few(self, x: torch.Tensor) -> bool:
        return not self.is_invariant and serves(x, self.weight, self.scales, self.group)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        if self._are_few(x):
            return self.few_rows(x, norm)
        return self.multiply(x if norm is None else norm.forward(x))

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None, **gates: Any) -> torch.Tensor:
        if self._are_few(x):
            return self.few_rows(x, norm, gated="ups" not in gates, **gates)
        return silu_and_mul(self.multiply(x if norm is None else norm.forward(x)), **gates)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        if self._are_few(x):
            self.few_rows(x, add_to=total)
        else:
            self.add_rows_to(total, x)

    @abstractmethod
    def add_rows_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        """`add_to` for more rows."""

    def few_rows(
        self,
        x: torch.Tensor,
        norm: RMSNorm | None = None,
        **options: Any,
    ) -> torch.Tensor:
        """All in one kernel; options: of `small_m_gemm`, which adds adapters before the gate."""
        return small_m_gemm(
            x,
            self.weight,
            scales=self.scales,
            group=self.group,
            bias=self.bias,
            norm=None if norm is None else norm.kernel_weight,
            **options,
        )


# Weights of the model's dtype: on CUDA, on other devices, and batch-invariant.


# For smaller weights oneDNN's fixed cost of a call exceeds what it saves.
MIN_PACKED_ELEMENTS = 1 << 19
PACKED_ROWS_HINT = 8


class PlainWeight(WeightFormat):
    """One tensor of the model's dtype. A checkpoint's quantised weights are dequantised at load."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight, bias
        self.matrix = weight.mT

    def slot(self, module: str, rows: Rows | None, part: Part) -> WeightSlot:
        own = None if rows is None else self.weight[rows]
        return WeightSlot(own, part.shape, part.shard_dim, part.start, part.order)

    def full_weight(self) -> torch.Tensor:
        return self.weight


def is_packed(weight: torch.Tensor) -> bool:
    """Whether a CPU keeps a copy of a float32 weight in oneDNN's layout."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    has_onednn = is_x86 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_onednn and weight.numel() >= MIN_PACKED_ELEMENTS


def cpu_copy_bytes(weight: torch.Tensor, *, is_shared: bool) -> int:
    """What `CpuWeight.specialize_for_cpu` adds to a weight `[N, K]`, which may be shared with an
    embedding."""
    num_copies = int(is_packed(weight)) + int(is_shared and weight.shape[0] > weight.shape[1])
    return num_copies * weight.numel() * weight.dtype.itemsize


class CpuWeight(PlainWeight):
    """Weights with more outputs than inputs and small weights are stored column-major: up to twice
    as fast for one row, and faster for the few rows of a verified window. For a large weight
    `specialize_for_cpu` adds a copy in oneDNN's blocked layout, which is faster than BLAS for
    several rows and doubles the memory."""

    packed: torch.Tensor | None = None

    @staticmethod
    def allocate(out_features: int, in_features: int, placement: Placement) -> nn.Parameter:
        fits = out_features >= in_features or out_features * in_features < MIN_PACKED_ELEMENTS
        return placement.parameter(out_features, in_features, column_major=fits)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and x.shape[0] > 1:
            output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self.packed, self.bias, "none", [], ""
            )
            return output
        return x.mm(self.matrix) if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def specialize_for_cpu(self) -> None:
        """Called after loading for float32."""
        weight = self.weight.detach()
        if weight.is_contiguous() and weight.shape[0] > weight.shape[1]:
            # The weight is shared with an embedding, so it is not column-major itself.
            self.matrix = weight.t().contiguous()
        if is_packed(weight):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(
                weight.contiguous(), PACKED_ROWS_HINT
            )


class CudaWeight(FewRowsFormat, PlainWeight):
    """More than 8 rows run the GEMM algorithms that were measured to be the fastest
    (linear_tuning.py), or torch's choice. So the order of sums depends on the number of rows."""

    tuned_gemms: TunedGemms | None = None

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        if self.tuned_gemms is not None:
            return tuned_linear(x, self.weight, self.tuned_gemms, bias=self.bias)
        return x.mm(self.matrix) if self.bias is None else torch.addmm(self.bias, x, self.matrix)

    def write_to(self, out: torch.Tensor, x: torch.Tensor, norm: RMSNorm | None = None) -> None:
        if self._are_few(x):
            self.few_rows(x, norm, out=out)
        else:
            super().write_to(out, x, norm)

    def add_rows_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        if self.tuned_gemms is not None:
            tuned_linear(x, self.weight, self.tuned_gemms, bias=self.bias, add_to=total)
        elif self.bias is None:
            total.addmm_(x, self.matrix)
        else:
            total.add_(self.multiply(x))


class BatchInvariantWeight(PlainWeight):
    """A row's result has the same bits in every batch."""

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return batch_invariant_linear(x, self.weight, self.bias)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        return batch_invariant_linear(x.float(), self.weight.float())
