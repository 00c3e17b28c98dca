"""The experts of a mixture-of-experts layer."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tllm_spec.kernels.experts.grouped_gemm import (
    block_rows_of,
)
from tllm_spec.kernels.experts.permute import moe_permute
from tllm_spec.kernels.experts.routing import OwnExperts
from tllm_spec.models.formats.choice import choose_stacked
from tllm_spec.models.formats.stacked_weight import StackedWeight
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.module import Module, Placement, StoredWeight, WeightSlot, sibling
from tllm_spec.models.moe_shape import MoEConfig, MoENames


@dataclass(frozen=True)
class FusedSlot(WeightSlot):
    """All experts in one tensor `[E, …]`: a rank takes its experts, and its slice of each of the
    `parts` that lie side by side in `shard_dim`."""

    first_expert: int = 0
    parts: int = 1
    may_be_transposed: bool = False
    """Qwen3-VL's are as published: `[E, inputs, outputs]`, and `[E, outputs, inputs]` as
    transformers has them in memory."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        number, rows, columns = self.shape
        both = self.shape, (number, columns, rows)
        return both if self.may_be_transposed else both[:1]

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        assert self.destination is not None and self.shard_dim is not None
        assert isinstance(tensor, torch.Tensor)  # quantised experts are refused
        if tuple(tensor.shape) != self.shape:
            tensor = tensor.transpose(1, 2)
        own = tensor.narrow(0, self.first_expert, len(self.destination))
        halves = (each.chunk(self.parts, self.shard_dim) for each in (self.destination, own))
        for destination, half in zip(*halves, strict=True):
            size = destination.shape[self.shard_dim]
            destination.copy_(half.narrow(self.shard_dim, self.start, size))


class Experts(Module):
    """A rank has some of the experts, and of these a slice of the intermediate size: all experts
    without expert parallelism, whole ones with nothing else. The last may be the shared one."""

    gate_up_weights: StackedWeight
    down_weights: StackedWeight

    def __init__(self, config: MoEConfig, placement: Placement, names: MoENames) -> None:
        super().__init__()
        self.names, self.mapping = names, placement.mapping
        self.num_routed = self.mapping.shard_experts(config.num_experts)
        hidden, number = config.hidden_size, self.num_routed + config.num_shared
        inner = self.mapping.shard_expert(config.intermediate_size)
        self.first = self.num_routed * self.mapping.ep_rank
        self.shape = number, hidden, inner
        self.limit = config.swiglu_limit
        self.gate_up_bias = placement.parameter(number, 2 * inner) if config.has_bias else None
        self.down_bias = placement.parameter(number, hidden) if config.has_bias else None
        if self.down_bias is not None and self.mapping.moe_tp_rank > 0:
            self.down_bias.zero_()  # the first rank of a slice adds it
        self._create(placement)

    def _create(self, placement: Placement) -> None:
        number, hidden, inner = self.shape
        full = inner * self.mapping.moe_tp_size
        shape, bias = (number, 2 * inner, hidden), self.gate_up_bias
        self._use("gate_up", choose_stacked(shape, placement, gated=True, bias=bias))
        own, bias = placement.of_inputs(inner, full), self.down_bias
        self._use("down", choose_stacked((number, hidden, inner), own, gated=False, bias=bias))

    def _use(self, name: str, weights: StackedWeight) -> None:
        """Replaces one of the two layers, with its tensors."""
        if f"{name}_weights" in self.__dict__:
            for each, _ in getattr(self, f"{name}_weights").parameters(name):
                setattr(self, each, None)
        setattr(self, f"{name}_weights", weights)
        for each, parameter in weights.parameters(name):
            setattr(self, each, parameter)

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        input_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each assignment's output, `[T * k, H]`, for x `[T, H]` and its experts `[T, k]`; that of
        another rank's expert is not defined. `input_weights` `[T, k]` multiply the inputs."""
        number, first = self.shape[0], None if self.mapping.ep_size == 1 else self.first
        form, num_sums = self.gate_up_weights.form, self.gate_up_weights.operands.num_sums(x.dtype)
        block_rows = block_rows_of(experts.numel(), number, x.dtype, x.device, form, num_sums)
        rows = moe_permute(experts, number, block_rows, first)
        inner = self.gate_up_weights.gated(x, rows, input_weights, self.limit)
        return self.down_weights.multiply(inner, rows)

    def own(self, experts: torch.Tensor) -> OwnExperts | None:
        """Which outputs for `experts` `[T, k]` are defined; None: all."""
        if self.mapping.ep_size == 1:
            return None
        return OwnExperts(experts, self.first, self.num_routed)

    def widen(self, placement: Placement) -> None:
        self._create(placement.wide)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        names, number = self.names, self.num_routed
        if names.fused:
            yield f"{path}.gate_up_proj", self._fused_slot(self.gate_up_weights, 2, 2)
            yield f"{path}.down_proj", self._fused_slot(self.down_weights, 1, 1)
        else:
            for expert in range(number * self.mapping.ep_size):
                parts = (names.gate, names.up, names.down)
                own = expert - self.first
                yield from self._slots_of(own, f"{path}.{expert}", parts)
                yield from self._biases_of(own, f"{path}.{expert}", parts)
        if number < self.shape[0]:
            parts = ("gate_proj", "up_proj", "down_proj")
            yield from self._slots_of(number, sibling(path, names.shared), parts)

    def _biases_of(
        self, expert: int, path: str, parts: tuple[str, str, str]
    ) -> Iterator[tuple[str, WeightSlot]]:
        """As `_slots_of`."""
        if self.gate_up_bias is None or self.down_bias is None:
            return
        number, hidden, inner = self.shape
        start, full = inner * self.mapping.moe_tp_rank, inner * self.mapping.moe_tp_size
        is_here = 0 <= expert < number
        for name, rows in zip(parts[:2], (slice(inner), slice(inner, None)), strict=True):
            own = self.gate_up_bias[expert, rows] if is_here else None
            yield f"{path}.{name}.bias", WeightSlot(own, (full,), 0, start)
        own = self.down_bias[expert] if is_here and start == 0 else None
        yield f"{path}.{parts[2]}.bias", WeightSlot(own, (hidden,))

    def _fused_slot(self, weights: StackedWeight, shard_dim: int, parts: int) -> FusedSlot:
        mapping = self.mapping
        own = weights.weight[: self.num_routed]
        if self.names.outputs_first:
            shard_dim = 3 - shard_dim
        else:
            own = own.transpose(1, 2)
        shape = list(own.shape)
        inner = shape[shard_dim] // parts
        shape[0] *= mapping.ep_size
        shape[shard_dim] *= mapping.moe_tp_size
        start = inner * mapping.moe_tp_rank
        of_experts = self.first, parts, self.names.outputs_first
        return FusedSlot(own, tuple(shape), shard_dim, start, None, *of_experts)

    def _slots_of(
        self, expert: int, path: str, parts: tuple[str, str, str]
    ) -> Iterator[tuple[str, WeightSlot]]:
        """expert: its index on this rank, outside of the range for another rank's. `parts`: the
        names of gate, up and down."""
        number, hidden, inner = self.shape
        own = expert if 0 <= expert < number else None
        start, full = inner * self.mapping.moe_tp_rank, inner * self.mapping.moe_tp_size
        halves = zip(parts[:2], (slice(inner), slice(inner, None)), strict=True)
        for name, rows in halves:
            part = Part((full, hidden), 0, start)
            yield from self.gate_up_weights.slots(f"{path}.{name}", own, rows, part)
        part = Part((hidden, full), 1, start)
        yield from self.down_weights.slots(f"{path}.{parts[2]}", own, slice(None), part)
