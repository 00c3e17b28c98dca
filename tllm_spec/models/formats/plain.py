"""Weights of the model's dtype: on CUDA, on other devices, and batch-invariant."""

import platform
from collections.abc import Iterator

import torch
from torch import nn

from tllm_spec.kernels.gemm.batch_invariant_linear import batch_invariant_linear
from tllm_spec.kernels.gemm.tuned_linear import TunedGemms, tuned_linear
from tllm_spec.models.formats.weight_format import FewRowsFormat, Part, WeightFormat
from tllm_spec.models.module import Placement, WeightSlot

# For smaller weights oneDNN's fixed cost of a call exceeds what it saves.
MIN_PACKED_ELEMENTS = 1 << 19
PACKED_ROWS_HINT = 8


class PlainWeight(WeightFormat):
    """One tensor of the model's dtype. A checkpoint's quantised weights are dequantised at load."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None) -> None:
        self.weight, self.bias = weight, bias
        self.matrix = weight.t()

    def slots(self, module: str, rows: slice, part: Part) -> Iterator[tuple[str, WeightSlot]]:
        own = self.weight[rows], part.shape, part.shard_dim, part.start, part.order
        yield f"{module}.weight", WeightSlot(*own)

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
