"""Weights of 4 bits with a scale and a zero point for each group of inputs, and activations of the
model's dtype (W4A16): kernels/gemm/int4_weights.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tllm_spec.kernels.gemm.int4_weights import (
    BLOCK,
    exponent_words,
    int4_dequantised,
    packed,
    row_bytes,
    row_words,
    unpacked,
)
from tllm_spec.models.formats.four_bit_packings import FourBitTensor, in_given_order
from tllm_spec.models.formats.fp8 import ScaledWeight
from tllm_spec.models.formats.gguf_tensors import GgufTensor
from tllm_spec.models.formats.quantisation import FourBitGroups
from tllm_spec.models.formats.weight_format import Part, Rows
from tllm_spec.models.layers import Placement, RMSNorm, StoredWeight, WeightSlot, tp_sizes


@dataclass(frozen=True)
class FourBitSlot(WeightSlot):
    """Also where the groups' words and the order of inputs go. `destination` has packed codes."""

    dtypes, is_quantised = (), True
    words: torch.Tensor | None = None
    """None: as `destination`."""
    in_features: int = 0
    """Inputs of the rank's slice."""
    take_order: Callable[[torch.Tensor | None], None] | None = None
    """Called with the order of the inputs; None: they have none."""

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        if self.destination is None or self.words is None:
            return
        if isinstance(tensor, GgufTensor):
            tensor = tensor.as_four_bit()
        assert isinstance(tensor, FourBitTensor)  # other layers have been made plain
        if self.take_order is not None:
            self.take_order(tensor.order)
        self.destination.copy_(packed(self._own(tensor.codes, 1)))
        # The word of a whole row belongs to each of its groups.
        words = self._own(tensor.words, tensor.group)
        if self.words.dtype == torch.uint8:
            words = exponent_words(words)
        self.words.copy_(words.expand_as(self.words))

    def _own(self, tensor: torch.Tensor, inputs: int) -> torch.Tensor:
        """This rank's slice. inputs: that share a column; 0: all."""
        assert self.destination is not None
        if self.shard_dim == 0:
            tensor = tensor.narrow(0, self.start, len(self.destination))
        elif self.shard_dim == 1 and inputs:
            size = -(-self.in_features // inputs)
            tensor = tensor.narrow(1, self.start // inputs, size)
        return tensor if self.order is None else tensor.index_select(0, self.order)


class FourBitWeight(ScaledWeight):
    """A weight of 4 bits. More than 64 rows have other chunks, and more than 256 are multiplied as
    those of a `ScaledWeight`. Whole rows are stored as groups with equal words."""

    order: nn.Parameter | None = None
    """`[K]` int64: the input of each column of the codes; zeros before loading."""

    def __init__(
        self, shape: tuple[int, ...], placement: Placement, bias: nn.Parameter | None
    ) -> None:
        groups, (*number, in_features) = placement.quantised.four_bit, shape
        assert groups is not None
        self.in_features, self.is_invariant = in_features, placement.batch_invariant
        self.bias, self.dtype = bias, placement.dtype
        if placement.input_slices > 1:
            check_slice(in_features, placement.input_slices, groups)
        self.group, word_type = groups.size or BLOCK, torch.int32
        if groups.is_float:
            word_type = torch.uint8 if groups.has_exponents else torch.float32
        num_words = row_words(in_features, self.group, word_type)
        kinds = (torch.uint8, row_bytes(in_features)), (word_type, num_words)
        self.weight, self.scales = (
            nn.Parameter(
                torch.zeros(*number, size, dtype=dtype, device=placement.memory),
                requires_grad=False,
            )
            for dtype, size in kinds
        )
        if groups.is_ordered:
            order = torch.zeros(in_features, dtype=torch.int64, device=placement.memory)
            self.order = nn.Parameter(order, requires_grad=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.in_features

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().parameters()
        if self.order is not None:
            yield "weight_order", self.order

    def slot(self, module: str, rows: Rows | None, part: Part) -> WeightSlot:
        """The checkpoint's other tensors come with the weight, as an `FourBitTensor`."""
        own, words = (None, None) if rows is None else (self.weight[rows], self.scales[rows])
        take_order = None if self.order is None else partial(self._take_order, module)
        place = own, part.shape, part.shard_dim, part.start, part.order
        return FourBitSlot(*place, words, self.in_features, take_order)

    def _take_order(self, module: str, order: torch.Tensor | None) -> None:
        """Raises ValueError if a part that is fused with this one has another order. module: in the
        checkpoint."""
        assert self.order is not None and order is not None
        order = order.to(self.order.device)
        if self.order.any() and not torch.equal(self.order, order):
            raise ValueError(
                f"g_idx of {module} is not that of the layers that read the same inputs, with "
                "which it is fused; such checkpoints are not served."
            )
        self.order.copy_(order)

    def forward(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        return super().forward(*self._in_order(x, norm))

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None, **gates: Any) -> torch.Tensor:
        return super().gated(*self._in_order(x, norm), **gates)

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        super().add_to(total, self._in_order(x, None)[0])

    def fuses_adapters(self, x: torch.Tensor) -> bool:
        return self.order is None and super().fuses_adapters(x)

    def _in_order(
        self, x: torch.Tensor, norm: RMSNorm | None
    ) -> tuple[torch.Tensor, RMSNorm | None]:
        """Inputs in the order of the codes, and the norm that is left to do."""
        if self.order is None:
            return x, norm
        return (x if norm is None else norm.forward(x)).index_select(1, self.order), None

    def full_weight(self) -> torch.Tensor:
        codes = unpacked(self.weight, self.in_features)
        values = int4_dequantised(codes, self.scales, self.group, self.dtype)
        return values if self.order is None else in_given_order(values, self.order)


def check_slice(in_features: int, tp_size: int, groups: FourBitGroups) -> None:
    """Raises ValueError if a rank's slice of inputs is not whole groups."""
    if groups.is_ordered:
        raise ValueError(
            f"tensor_parallel_size is {tp_size}; 4-bit weights with desc_act (actorder) have "
            "groups of inputs that are spread over a row, and are served on one device."
        )
    if groups.size and in_features % groups.size:
        raise ValueError(
            f"tensor_parallel_size is {tp_size}; a layer has {in_features * tp_size} inputs in "
            f"groups of {groups.size}, of which a device needs whole ones: with "
            f"{tp_sizes(in_features * tp_size, groups.size)} it has."
        )
