"""Chooses the weight format of a linear layer."""

from torch import nn

from tllm_spec.models.formats.fp8_activations import QuantisedActivations
from tllm_spec.models.formats.fp8_scaled import BatchInvariantScaledWeight, ScaledWeight
from tllm_spec.models.formats.int4 import BatchInvariantInt4Weight, Int4Weight
from tllm_spec.models.formats.plain import BatchInvariantWeight, CpuWeight, CudaWeight, PlainWeight
from tllm_spec.models.formats.weight_format import WeightFormat
from tllm_spec.models.module import Placement


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
