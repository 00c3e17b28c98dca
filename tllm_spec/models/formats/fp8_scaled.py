"""FP8 weights with float32 scales for each row and each 128 inputs, and activations of the model's
dtype (W8A16): kernels/gemm/scaled_linear.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tllm_spec.kernels.gemm.fp8_numbers import BLOCK, dequantised
from tllm_spec.kernels.gemm.scaled_linear import scaled_linear
from tllm_spec.models.formats.weight_format import FewRowsFormat, Part, WeightFormat
from tllm_spec.models.module import Placement, StoredWeight, WeightSlot

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Fp8Tensor:
    """A checkpoint's weight `[N, K]` in FP8, with its scales `[N, ceil(K / 128)]`."""

    weight: torch.Tensor
    scales: torch.Tensor
    input_scale: torch.Tensor | None = None
    """`[]` float32: the static scale of its activations, if they have one."""

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        return dequantised(self.weight, self.scales, dtype)


@dataclass(frozen=True)
class ScaledSlot(WeightSlot):
    """Also where the scales of an FP8 tensor go, `[N, ceil(K / 128)]` of this rank, or if all of a
    row are equal `[N, 1]`."""

    dtypes, is_quantised = (), True
    scales: torch.Tensor | None = None
    """None: as `destination`."""

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        if self.destination is None or self.scales is None:
            return
        assert isinstance(tensor, Fp8Tensor)  # other layers have been made plain
        self.destination.copy_(self.own(tensor.weight))
        self.scales.copy_(self.own(tensor.scales, BLOCK)[:, : self.scales.shape[1]])


def scaled_parameters(
    *shape: int, device: torch.device, dtype: torch.dtype = FP8
) -> tuple[nn.Parameter, nn.Parameter]:
    """A weight `[..., N, K]` and its scales `[..., N, ceil(K / 128)]`, uninitialised."""
    weight = torch.empty(shape, dtype=dtype, device=device)
    sizes = *shape[:-1], -(-shape[-1] // BLOCK)
    scales = torch.empty(sizes, dtype=torch.float32, device=device)
    return nn.Parameter(weight, requires_grad=False), nn.Parameter(scales, requires_grad=False)


class ScaledTensors(WeightFormat):
    """The tensors of an FP8 weight. `dtype`: of the numbers without their scales."""

    scales: nn.Parameter

    def __init__(
        self,
        out_features: int,
        in_features: int,
        placement: Placement,
        bias: nn.Parameter | None,
        dtype: torch.dtype = FP8,
    ) -> None:
        self.weight, self.scales = scaled_parameters(
            out_features, in_features, device=placement.device, dtype=dtype
        )
        self.bias, self.dtype = bias, placement.dtype

    def slots(self, module: str, rows: slice, part: Part) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint's scales come with the weight, as an `Fp8Tensor`."""
        own = self.weight[rows], part.shape, part.shard_dim, part.start, part.order
        yield f"{module}.weight", ScaledSlot(*own, scales=self.scales[rows])

    def full_weight(self) -> torch.Tensor:
        return dequantised(self.weight, self.scales, self.dtype)


class ScaledGemms(FewRowsFormat):
    """GEMMs of a weight with scales, in FP8 or 4 bits. More than 256 rows are multiplied by the
    weight that was dequantised to 16 bits just before. So the order of sums depends on the number
    of rows."""

    scales: nn.Parameter

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return self._rows(x)

    def add_rows_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        self._rows(x, total)

    def _rows(self, x: torch.Tensor, total: torch.Tensor | None = None) -> torch.Tensor:
        own = self.weight, self.scales, self.bias
        return scaled_linear(x, *own, group=self.group, add_to=total, invariant=False)


class BatchInvariantScaledGemms(WeightFormat):
    """A row's result has the same bits in every batch."""

    scales: nn.Parameter

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        return scaled_linear(x, self.weight, self.scales, self.bias, group=self.group)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        own = self.weight, self.scales, self.bias
        scaled_linear(x, *own, group=self.group, add_to=total)


class ScaledWeight(ScaledTensors, ScaledGemms):
    """An FP8 weight."""


class BatchInvariantScaledWeight(ScaledTensors, BatchInvariantScaledGemms):
    """An FP8 weight for `deterministic: true`."""
