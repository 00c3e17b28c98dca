"""The weights of one linear layer of all experts that a rank has, in the formats of linear layers,
with the GEMMs of experts (kernels/experts/grouped_gemm.py)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tllm_spec.kernels.experts.grouped_gemm import ExpertWeights, Form, down, gate_up_silu
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm.int4_weights import dequantise_int4, is_exact
from tllm_spec.models.formats.fp8 import QuantisedActivations
from tllm_spec.models.formats.quantisation import BLOCK
from tllm_spec.models.layers import Placement
from tllm_spec.models.linear import choose_format

# Rows of an expert from which exact weights of 4 bits are dequantised, and the most bytes that the
# experts of a layer may take then.
WIDE_ROWS, WIDE_BYTES = 512, 1 << 30


class StackedWeight:
    """E weights `[N, K]`, contiguous, of the model's dtype, in FP8 or of 4 bits without an order of
    the inputs. Results have the same arithmetic for any number of rows. Where activations are
    quantised, a token is, once for all of its experts, and what the second layer reads once for
    each."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        placement: Placement,
        bias: nn.Parameter | None,
        *,
        gated: bool,
    ) -> None:
        """shape: E, N and K. bias: `[E, N]`. gated: whether the outputs are gates and ups, of
        inputs that experts share. Raises ValueError for inputs that cannot be split over the
        ranks."""
        quantised = placement.quantised
        if quantised.four_bit is not None and quantised.four_bit.is_ordered:
            placement = placement.wide
        _check_ranks(placement)
        self.shape, self.is_gated, self.ep_size = shape, gated, placement.mapping.ep_size
        self.form = choose_format(shape, placement, bias, has_own_inputs=not gated)
        self.kind = self._kind(placement)
        form, has_tiles = self.form, self.kind == "tiles"
        self.operands = ExpertWeights(form.weight, form.scales, form.group, bias, has_tiles)

    def _kind(self, placement: Placement) -> Form:
        form, quantised = self.form, placement.quantised
        if form.scales is None:
            return "plain"
        if not isinstance(form, QuantisedActivations):
            return "int4" if form.group else "fp8"
        in_blocks = form.activations.shared_by == "block"
        if form.scales.shape[2] == 1 and not in_blocks:
            return "codes"
        # Both layers, whose blocks of rows are the same, have tiles or neither.
        _, outputs, inputs = self.shape
        step = 2 * BLOCK if self.is_gated else BLOCK
        aligned = outputs % (2 * BLOCK) == 0 == inputs % step
        has_tiles = quantised.fp8 == "block" and in_blocks and aligned and form.bias is None
        return "tiles" if has_tiles else "blocks"

    def parameters(self, name: str) -> Iterator[tuple[str, nn.Parameter]]:
        """What the layer registers, with names that begin with `name`."""
        for own, parameter in self.form.parameters():
            yield f"{name}_{own}".replace("_weight", ""), parameter

    def gated(
        self,
        x: torch.Tensor,
        rows: ExpertRows,
        input_weights: torch.Tensor | None = None,
        **gates: Any,
    ) -> torch.Tensor:
        """See `gate_up_silu`, for x `[T, K]` of the model's dtype. gates: `limit` and
        `activation`."""
        form = self.form
        if not isinstance(form, QuantisedActivations):
            return gate_up_silu(x, self.operands_for(x, rows), rows, input_weights, **gates)
        codes, code_scales = form.quantised(x)
        given = codes, self.operands, rows, input_weights
        return gate_up_silu(*given, **gates, code_scales=code_scales, dtype=form.dtype)

    def multiply(self, x: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
        """See `down`, for x `[P, K]` of the model's dtype."""
        form = self.form
        if not isinstance(form, QuantisedActivations):
            return down(x, self.operands_for(x, rows), rows)
        has_own_scales = form.input_scale is not None and form.input_scale.ndim
        experts = rows.experts_of_rows(self.shape[0]) if has_own_scales else None
        codes, code_scales = form.quantised(x, experts=experts)
        return down(codes, self.operands, rows, code_scales=code_scales, dtype=form.dtype)

    def operands_for(self, x: torch.Tensor, rows: ExpertRows) -> ExpertWeights:
        """The weights; those of 4 bits that are exact in x's type are dequantised before many rows
        are multiplied, which changes no bit of a result."""
        if self.kind != "int4":
            return self.operands
        number, features, inputs = self.shape
        num_rows = len(rows.order) // (number * self.ep_size)  # of an expert, on average
        num_bytes = number * features * inputs * x.dtype.itemsize
        words = self.operands.scales
        assert words is not None
        if num_rows < WIDE_ROWS or num_bytes > WIDE_BYTES or not is_exact(words, x.dtype):
            return self.operands
        wide = x.new_empty(self.shape)
        codes, words = self.operands.weight.flatten(0, 1), words.flatten(0, 1)
        dequantise_int4(codes, words, self.operands.group, wide.flatten(0, 1))
        return ExpertWeights(wide, bias=self.operands.bias)


def _check_ranks(placement: Placement) -> None:
    """Raises ValueError if ranks with slices of the inputs, which share a token's scale, do not
    have the same rows."""
    mapping, activations = placement.mapping, placement.quantised.activations
    has_scales = activations is not None and activations.shared_by == "token"
    if has_scales and placement.input_slices > 1 and mapping.ep_size > 1:
        raise ValueError(
            f"moe_expert_parallel_size is {mapping.ep_size} with tensor_parallel_size "
            f"{mapping.tp_size}; experts whose activations have one scale a token are either "
            f"sliced or spread: moe_expert_parallel_size 1 or {mapping.tp_size} is served. With "
            "fp8_activations: false any is."
        )
