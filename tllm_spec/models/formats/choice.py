"""Chooses the weight format of a linear layer, and of the experts' layers."""

from torch import nn

from tllm_spec.models.formats.fp8 import (
    BatchInvariantScaledWeight,
    QuantisedActivations,
    ScaledWeight,
)
from tllm_spec.models.formats.int4 import BatchInvariantInt4Weight, Int4Weight
from tllm_spec.models.formats.stacked_weight import (
    StackedCodes,
    StackedInt4,
    StackedScaled,
    StackedWeight,
)
from tllm_spec.models.formats.weight_format import (
    BatchInvariantWeight,
    CpuWeight,
    CudaWeight,
    PlainWeight,
    WeightFormat,
)
from tllm_spec.models.layers import Placement


def choose_format(
    out_features: int, in_features: int, placement: Placement, bias: nn.Parameter | None
) -> WeightFormat:
    """The format of the placement's weights, with new tensors."""
    if placement.activations is not None:
        return QuantisedActivations(out_features, in_features, placement, bias)
    if placement.int4 is not None:
        codes = BatchInvariantInt4Weight if placement.batch_invariant else Int4Weight
        return codes(out_features, in_features, placement, bias)
    if placement.fp8 is not None:
        scaled = BatchInvariantScaledWeight if placement.batch_invariant else ScaledWeight
        return scaled(out_features, in_features, placement, bias)
    if placement.device.type == "cpu" and not placement.batch_invariant:
        return CpuWeight(CpuWeight.allocate(out_features, in_features, placement), bias)
    return plain_format(placement.parameter(out_features, in_features), placement, bias)


def plain_format(
    weight: nn.Parameter, placement: Placement, bias: nn.Parameter | None
) -> PlainWeight:
    """The format of a given weight of the placement's dtype, row-major."""
    if placement.batch_invariant:
        return BatchInvariantWeight(weight, bias)
    return CudaWeight(weight, bias) if placement.device.type == "cuda" else CpuWeight(weight, bias)


def choose_stacked(
    shape: tuple[int, int, int],
    placement: Placement,
    *,
    gated: bool,
    bias: nn.Parameter | None = None,
) -> StackedWeight:
    """The same of all experts: `shape` is their number, outputs and inputs; bias `[E, N]`. gated:
    whether the outputs are gates and ups."""
    if placement.activations is not None:
        return StackedCodes(shape, placement, bias, gated=gated)
    if placement.int4 is not None and not placement.int4.is_ordered:
        return StackedInt4(shape, placement, bias)
    if placement.fp8 is not None:
        return StackedScaled(shape, placement, bias)
    return StackedWeight(shape, placement, bias)
