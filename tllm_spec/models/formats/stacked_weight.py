"""The weights of one linear layer of all experts that a rank has: of the model's dtype, in FP8, or
of 4 bits, each with activations of the model's dtype (kernels/experts/grouped_gemm.py)."""

from collections.abc import Iterator

import torch
from torch import nn

from tllm_spec.kernels.experts.grouped_gemm import ExpertWeights, Form, down, gate_up_silu
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm.int4_weights import dequantise_int4, is_exact
from tllm_spec.models.formats.fp8_scaled import ScaledSlot, scaled_parameters
from tllm_spec.models.formats.int4 import Int4Slot, check_slice, int4_parameters
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.module import Placement, WeightSlot

# Rows of an expert from which exact weights of 4 bits are dequantised, and the most bytes that the
# experts of a layer may take then.
WIDE_ROWS, WIDE_BYTES = 512, 1 << 30


class StackedWeight:
    """E weights `[N, K]`, contiguous. Results have the same arithmetic for any number of rows."""

    form: Form = "plain"
    operands: ExpertWeights
    weight: nn.Parameter
    scales: nn.Parameter | None = None

    def __init__(
        self, shape: tuple[int, int, int], placement: Placement, bias: nn.Parameter | None
    ) -> None:
        """shape: E, N and K. bias: `[E, N]`."""
        self.shape = shape
        self.weight = placement.parameter(*shape)
        self.operands = ExpertWeights(self.weight, bias=bias)

    def parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """What the layer registers, with names that begin with `name`."""
        yield name, self.weight
        if self.scales is not None:
            yield f"{name}_scales", self.scales

    def slots(
        self, module: str, expert: int | None, rows: slice, part: Part
    ) -> Iterator[tuple[str, WeightSlot]]:
        """As those of a `WeightFormat`, of one expert. expert: its index here; None: another rank
        has it."""
        own = None if expert is None else self.weight[expert, rows]
        yield f"{module}.weight", WeightSlot(own, part.shape, part.shard_dim, part.start)

    def gated(
        self,
        x: torch.Tensor,
        rows: ExpertRows,
        input_weights: torch.Tensor | None = None,
        limit: float | None = None,
    ) -> torch.Tensor:
        """See `gate_up_silu`, for x `[T, K]` of the model's dtype."""
        return gate_up_silu(x, self.operands_for(x, rows), rows, input_weights, limit=limit)

    def multiply(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """See `down`, for x `[P, K]` of the model's dtype."""
        return down(x, self.operands_for(x, rows), rows)

    def operands_for(self, x: torch.Tensor, rows: ExpertRows) -> ExpertWeights:
        return self.operands


class StackedScaled(StackedWeight):
    """FP8 weights with scales as those of `ScaledTensors`."""

    form: Form = "fp8"
    scales: nn.Parameter

    def __init__(
        self, shape: tuple[int, int, int], placement: Placement, bias: nn.Parameter | None
    ) -> None:
        self.shape = shape
        self.weight, self.scales = scaled_parameters(*shape, device=placement.device)
        self.operands = ExpertWeights(self.weight, self.scales, bias=bias)

    def slots(
        self, module: str, expert: int | None, rows: slice, part: Part
    ) -> Iterator[tuple[str, WeightSlot]]:
        own = None if expert is None else self.weight[expert, rows]
        scales = None if expert is None else self.scales[expert, rows]
        place = own, part.shape, part.shard_dim, part.start
        yield f"{module}.weight", ScaledSlot(*place, scales=scales)


class StackedInt4(StackedWeight):
    """Weights of 4 bits with words as those of `Int4Tensors`, without an order of the inputs.

    Weights that are exact in x's type are dequantised before many rows are multiplied, which
    changes no bit of a result."""

    form: Form = "int4"
    scales: nn.Parameter

    def __init__(
        self, shape: tuple[int, int, int], placement: Placement, bias: nn.Parameter | None
    ) -> None:
        assert placement.int4 is not None
        self.shape = shape
        if placement.splits_inputs:
            check_slice(shape[2], placement.mapping.moe_tp_size, placement.int4)
        self.weight, self.scales, group = int4_parameters(shape, placement)
        self.operands = ExpertWeights(self.weight, self.scales, group, bias)
        self.ep_size = placement.mapping.ep_size

    def operands_for(self, x: torch.Tensor, rows: ExpertRows) -> ExpertWeights:
        number, features, inputs = self.shape
        num_rows = len(rows.order) // (number * self.ep_size)  # of an expert, on average
        num_bytes = number * features * inputs * x.dtype.itemsize
        if num_rows < WIDE_ROWS or num_bytes > WIDE_BYTES or not is_exact(self.scales, x.dtype):
            return self.operands
        wide = x.new_empty(self.shape)
        codes, words = self.weight.flatten(0, 1), self.scales.flatten(0, 1)
        dequantise_int4(codes, words, self.operands.group, wide.flatten(0, 1))
        return ExpertWeights(wide, bias=self.operands.bias)

    def slots(
        self, module: str, expert: int | None, rows: slice, part: Part
    ) -> Iterator[tuple[str, WeightSlot]]:
        own = None if expert is None else self.weight[expert, rows]
        words = None if expert is None else self.scales[expert, rows]
        place = own, part.shape, part.shard_dim, part.start
        yield f"{module}.weight", Int4Slot(*place, words=words, in_features=self.shape[2])
