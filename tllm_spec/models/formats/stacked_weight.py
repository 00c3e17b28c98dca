"""The weights of one linear layer of all experts that a rank has: of the model's dtype, in FP8, or
of 4 bits, each with activations of the model's dtype (kernels/experts/grouped_gemm.py)."""

from collections.abc import Iterator

import torch
from torch import nn

from tllm_spec.distributed.communicator import Communicator
from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.grouped_gemm import ExpertWeights, Form, down, gate_up_silu
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm.fp8_numbers import quantise_rows
from tllm_spec.kernels.gemm.int4_weights import dequantise_int4, is_exact
from tllm_spec.models.formats.four_bit import FourBitSlot, check_slice, four_bit_parameters
from tllm_spec.models.formats.fp8 import FP8, CodesSlot, ScaledSlot, check_blocks, scaled_parameters
from tllm_spec.models.formats.quantisation import BLOCK
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.layers import Placement, WeightSlot

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


class StackedFourBit(StackedWeight):
    """Weights of 4 bits with words as those of `Int4Tensors`, without an order of the inputs.

    Weights that are exact in x's type are dequantised before many rows are multiplied, which
    changes no bit of a result."""

    form: Form = "int4"
    scales: nn.Parameter

    def __init__(
        self, shape: tuple[int, int, int], placement: Placement, bias: nn.Parameter | None
    ) -> None:
        groups = placement.quantised.four_bit
        assert groups is not None
        self.shape = shape
        if placement.splits_inputs:
            check_slice(shape[2], placement.mapping.moe_tp_size, groups)
        self.weight, self.scales, group = four_bit_parameters(shape, placement)
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
        yield f"{module}.weight", FourBitSlot(*place, words=words, in_features=self.shape[2])


# Experts with FP8 weights, and activations that are quantised to FP8 (W8A8):
# kernels/gemm/fp8_numbers.py and kernels/experts/grouped_gemm.py.


class StackedCodes(StackedScaled):
    """A token is quantised once for all of its experts, and what the second layer reads once for
    each. The reference multiplies codes in float64, so CPUs keep the weights' codes in that
    type."""

    form: Form = "codes"
    input_scale: nn.Parameter | None = None
    """float32, static scales of activations: `[]` of a gated layer, whose experts share their
    inputs, and `[E]` of the other."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        placement: Placement,
        bias: nn.Parameter | None,
        *,
        gated: bool,
    ) -> None:
        quantised = placement.quantised
        assert quantised.activations is not None
        self.shape, device = shape, placement.device
        on_kernels = device.type != "cpu" or has_kernels(device)
        number, outputs, inputs = shape
        self.weight, _ = scaled_parameters(
            *shape, device=device, dtype=FP8 if on_kernels else torch.float64
        )
        columns = 1 if quantised.fp8 in ("tensor", "row") else -(-inputs // BLOCK)
        # In memory `[E, columns, N]`, as the kernel reads it.
        scales = torch.empty(number, columns, outputs, device=device).transpose(1, 2)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.activations, self.dtype = quantised.activations, placement.dtype
        in_blocks = self.activations.shared_by == "block"
        # Both layers, whose blocks of rows are the same, have tiles or neither.
        aligned = outputs % (2 * BLOCK) == 0 == inputs % (2 * BLOCK if gated else BLOCK)
        has_tiles = quantised.fp8 == "block" and in_blocks and aligned and bias is None
        if columns > 1 or in_blocks:
            self.form = "tiles" if has_tiles else "blocks"
        self.operands = ExpertWeights(self.weight, self.scales, bias=bias, has_tiles=has_tiles)
        if self.activations.shared_by == "tensor":
            zeros = torch.zeros(() if gated else number, dtype=torch.float32, device=device)
            self.input_scale = nn.Parameter(zeros, requires_grad=False)
        self.communicator = None
        if placement.splits_inputs:
            self.communicator = _of_slices(inputs, placement)

    def parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().parameters(name)
        if self.input_scale is not None:
            yield f"{name}_input_scale", self.input_scale

    def slots(
        self, module: str, expert: int | None, rows: slice, part: Part
    ) -> Iterator[tuple[str, WeightSlot]]:
        own = None if expert is None else self.weight[expert, rows]
        scales = None if expert is None else self.scales[expert, rows]
        input_scale: torch.Tensor | None = self.input_scale
        if input_scale is not None and input_scale.ndim:
            input_scale = None if expert is None else input_scale[expert]
        place = own, part.shape, part.shard_dim, part.start
        yield (
            f"{module}.weight",
            CodesSlot(*place, scales=scales, input_scale=input_scale, module=module),
        )

    def gated(
        self,
        x: torch.Tensor,
        rows: ExpertRows,
        input_weights: torch.Tensor | None = None,
        limit: float | None = None,
    ) -> torch.Tensor:
        codes, code_scales = self._quantised(x, self.input_scale)
        return gate_up_silu(
            codes,
            self.operands,
            rows,
            input_weights,
            limit=limit,
            code_scales=code_scales,
            dtype=self.dtype,
        )

    def multiply(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        scale: torch.Tensor | None = self.input_scale
        if scale is not None:
            scale = scale[rows.experts_of_rows(len(scale))]
        codes, code_scales = self._quantised(x, scale)
        return down(codes, self.operands, rows, code_scales=code_scales, dtype=self.dtype)

    def _quantised(
        self, x: torch.Tensor, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales. Ranks with slices of the inputs share the largest magnitude."""
        magnitudes = None
        if self.communicator is not None:
            magnitudes = self.communicator.all_gather(x.abs().amax(1, keepdim=True).float())
        return quantise_rows(
            x,
            in_blocks=self.activations.shared_by == "block",
            scale=scale,
            magnitudes=magnitudes,
            bound=self.activations.bound,
        )


def _of_slices(inputs: int, placement: Placement) -> Communicator | None:
    """What gathers the magnitudes of a rank's slices of the inputs, where a token has a scale of
    its own. Raises ValueError if a scale belonged to several ranks, or the ranks of a slice do not
    have the same rows."""
    assert placement.quantised.activations is not None
    mapping, shared_by = placement.mapping, placement.quantised.activations.shared_by
    if shared_by == "block":
        check_blocks(inputs, mapping.moe_tp_size, "moe_tensor_parallel_size")
    if shared_by != "token":
        return None
    if mapping.ep_size > 1:
        raise ValueError(
            f"moe_expert_parallel_size is {mapping.ep_size} with tensor_parallel_size "
            f"{mapping.tp_size}; experts whose activations have one scale a token are either "
            f"sliced or spread: moe_expert_parallel_size 1 or {mapping.tp_size} is served. With "
            "fp8_activations: false any is."
        )
    return placement.communicator


def choose_stacked(
    shape: tuple[int, int, int],
    placement: Placement,
    *,
    gated: bool,
    bias: nn.Parameter | None = None,
) -> StackedWeight:
    """The format of the weights of all experts, with new tensors: `shape` is their number, outputs
    and inputs; bias `[E, N]`. gated: whether the outputs are gates and ups."""
    form = placement.quantised
    if form.activations is not None:
        return StackedCodes(shape, placement, bias, gated=gated)
    if form.four_bit is not None and not form.four_bit.is_ordered:
        return StackedFourBit(shape, placement, bias)
    if form.fp8 is not None:
        return StackedScaled(shape, placement, bias)
    return StackedWeight(shape, placement, bias)
