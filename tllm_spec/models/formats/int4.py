"""Weights of 4 bits with a scale and a zero point for each group of inputs, and activations of the
model's dtype (W4A16): kernels/int4_weights.py."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from tllm_spec.kernels.int4_weights import (
    BLOCK,
    int4_dequantised,
    packed,
    row_bytes,
    unpacked,
)
from tllm_spec.models.formats.fp8_scaled import BatchInvariantScaledGemms, ScaledGemms
from tllm_spec.models.formats.int4_formats import Int4Groups
from tllm_spec.models.formats.weight_format import Part, WeightFormat
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.module import Placement, StoredWeight, WeightSlot


@dataclass(frozen=True)
class Int4Tensor:
    """A checkpoint's weight `[N, K]`: codes of 0 to 15, with the groups' words `[N, G]`."""

    codes: torch.Tensor
    words: torch.Tensor
    group: int
    """Inputs that share a scale; 0: all of a row."""
    order: torch.Tensor | None = None
    """`[K]` int64: the input of each column of the codes; None: its own."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantised(self, dtype: torch.dtype) -> torch.Tensor:
        values = int4_dequantised(self.codes, self.words, self.group or self.shape[1], dtype)
        return values if self.order is None else in_given_order(values, self.order)


def in_given_order(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Columns of `values` `[N, K]`, which are those of the inputs `order` `[K]`, where they
    belong."""
    return torch.empty_like(values).index_copy_(1, order, values)


@dataclass(frozen=True)
class Int4Slot(WeightSlot):
    """Also where the groups' words and the order of inputs go. `destination` has packed codes."""

    dtypes, is_quantised = (), True
    words: torch.Tensor | None = None
    form: "Int4Tensors | None" = None
    """The format of the whole layer."""
    module: str = ""
    """In the checkpoint, for errors."""

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        assert isinstance(tensor, Int4Tensor)  # other layers have been made plain
        assert self.form is not None and self.destination is not None and self.words is not None
        if self.form.order is not None:
            self.form.take_order(tensor.order, self.module)
        self.destination.copy_(packed(self._own(tensor.codes, 1)))
        # The word of a whole row belongs to each of its groups.
        self.words.copy_(self._own(tensor.words, tensor.group).expand_as(self.words))

    def _own(self, tensor: torch.Tensor, inputs: int) -> torch.Tensor:
        """This rank's slice. inputs: that share a column; 0: all."""
        assert self.form is not None and self.destination is not None
        if self.shard_dim == 0:
            tensor = tensor.narrow(0, self.start, len(self.destination))
        elif self.shard_dim == 1 and inputs:
            size = -(-self.form.shape[1] // inputs)
            tensor = tensor.narrow(1, self.start // inputs, size)
        return tensor if self.order is None else tensor.index_select(0, self.order)


class Int4Tensors(WeightFormat):
    """The tensors of a weight of 4 bits. Whole rows are stored as groups with equal words."""

    scales: nn.Parameter
    order: nn.Parameter | None = None
    """`[K]` int64: the input of each column of the codes; zeros before loading."""

    def __init__(
        self, out_features: int, in_features: int, placement: Placement, bias: nn.Parameter | None
    ) -> None:
        assert placement.int4 is not None
        groups, self.in_features = placement.int4, in_features
        self.group = groups.size or BLOCK
        self.bias, self.dtype = bias, placement.dtype
        if placement.splits_inputs:
            _check_slice(in_features, placement.mapping.tp_size, groups)

        def parameter(dtype: torch.dtype, *shape: int) -> nn.Parameter:
            values = torch.zeros(shape, dtype=dtype, device=placement.device)
            return nn.Parameter(values, requires_grad=False)

        self.weight = parameter(torch.uint8, out_features, row_bytes(in_features))
        words = torch.float32 if groups.is_float else torch.int32
        self.scales = parameter(words, out_features, -(-in_features // self.group))
        if groups.is_ordered:
            self.order = parameter(torch.int64, in_features)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.in_features

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super().parameters()
        if self.order is not None:
            yield "weight_order", self.order

    def slots(self, module: str, rows: slice, part: Part) -> Iterator[tuple[str, WeightSlot]]:
        """The checkpoint's other tensors come with the weight, as an `Int4Tensor`."""
        own = self.weight[rows], part.shape, part.shard_dim, part.start, part.order
        slot = Int4Slot(*own, words=self.scales[rows], form=self, module=module)
        yield f"{module}.weight", slot

    def take_order(self, order: torch.Tensor | None, module: str) -> None:
        """Raises ValueError if a part that is fused with this one has another order."""
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

    def gated(self, x: torch.Tensor, norm: RMSNorm | None = None) -> torch.Tensor:
        return super().gated(*self._in_order(x, norm))

    def add_to(self, total: torch.Tensor, x: torch.Tensor) -> None:
        super().add_to(total, self._in_order(x, None)[0])

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


class Int4Weight(Int4Tensors, ScaledGemms):
    """More than 256 rows are multiplied by the weight that was dequantised to 16 bits just
    before. So the order of sums depends on the number of rows."""


class BatchInvariantInt4Weight(Int4Tensors, BatchInvariantScaledGemms):
    """A row's result has the same bits in every batch."""


def _check_slice(in_features: int, tp_size: int, groups: Int4Groups) -> None:
    """Raises ValueError if a rank's slice of inputs is not whole groups."""
    if groups.is_ordered:
        raise ValueError(
            f"tensor_parallel_size is {tp_size}; 4-bit weights with desc_act (actorder) have "
            "groups of inputs that are spread over a row, and are served on one device."
        )
    if groups.size and in_features % groups.size:
        number, rest = divmod(in_features * tp_size, groups.size)
        sizes = [size for size in range(1, number + 1) if not rest and number % size == 0]
        raise ValueError(
            f"tensor_parallel_size is {tp_size}; a layer has {in_features * tp_size} inputs in "
            f"groups of {groups.size}, of which a device needs whole ones: with "
            f"{', '.join(map(str, sizes or [1]))} devices it has."
        )
