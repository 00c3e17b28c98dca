"""The experts of a mixture-of-experts layer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from tllm_spec.kernels.grouped_gemm import block_rows_of, down, gate_up_silu
from tllm_spec.kernels.moe_permute import ExpertRows, moe_permute
from tllm_spec.models.formats.fp8_scaled import ScaledSlot, scaled_parameters
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.module import Module, Placement, StoredWeight, WeightSlot, sibling
from tllm_spec.models.moe_shape import MoEConfig, MoENames


@dataclass(frozen=True)
class FusedSlot(WeightSlot):
    """All experts in one tensor `[E, …]`: a rank takes its experts, and its slice of each of the
    `parts` that lie side by side in `shard_dim`."""

    first_expert: int = 0
    parts: int = 1

    def load(self, tensor: torch.Tensor | StoredWeight) -> None:
        assert self.destination is not None and self.shard_dim is not None
        assert isinstance(tensor, torch.Tensor)  # in FP8 Llama 4 is refused
        own = tensor.narrow(0, self.first_expert, len(self.destination))
        halves = (each.chunk(self.parts, self.shard_dim) for each in (self.destination, own))
        for destination, half in zip(*halves, strict=True):
            size = destination.shape[self.shard_dim]
            destination.copy_(half.narrow(self.shard_dim, self.start, size))


class Experts(Module):
    """A rank has some of the experts, and of these a slice of the intermediate size: all experts
    without expert parallelism, whole ones with nothing else. The last may be the shared one."""

    def __init__(self, config: MoEConfig, placement: Placement, names: MoENames) -> None:
        super().__init__()
        self.names, self.mapping = names, placement.mapping
        self.num_routed = self.mapping.shard_experts(config.num_experts)
        hidden, number = config.hidden_size, self.num_routed + config.num_shared
        inner = self.mapping.shard_expert(config.intermediate_size)
        self.first = self.num_routed * self.mapping.ep_rank
        self.gate_up, self.gate_up_scales = _parameters(placement, number, 2 * inner, hidden)
        # Experts do not quantise activations.
        own = replace(placement, activations=None).of_inputs(inner, config.intermediate_size)
        self.down, self.down_scales = _parameters(own, number, hidden, inner)

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        input_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each assignment's output on this rank, `[T * k, H]`, for x `[T, H]` and its experts
        `[T, k]`. `input_weights` `[T, k]` multiply the inputs."""
        number = self.gate_up.shape[0]
        block_rows = block_rows_of(experts.numel(), number, x.dtype, x.device)
        if self.mapping.ep_size == 1:
            rows = moe_permute(experts, number, block_rows)
            return self._output(x, rows, input_weights)
        experts = experts - self.first
        is_elsewhere = (experts < 0) | (experts >= number)
        # As one more expert, which sorts last, and whose blocks are left out.
        experts = experts.masked_fill(is_elsewhere, number)
        rows = moe_permute(experts, number + 1, block_rows)
        left_out = (is_elsewhere.sum(dtype=torch.int32) + (block_rows - 1)) // block_rows
        rows = replace(rows, num_blocks=rows.num_blocks - left_out)
        parts = self._output(x, rows, input_weights)
        return parts.masked_fill_(is_elsewhere.view(-1, 1), 0)

    def _output(
        self, x: torch.Tensor, rows: ExpertRows, input_weights: torch.Tensor | None
    ) -> torch.Tensor:
        inner = gate_up_silu(x, self.gate_up, rows, input_weights, self.gate_up_scales)
        return down(inner, self.down, rows, self.down_scales)

    def widen(self, placement: Placement) -> None:
        self.gate_up, self.gate_up_scales = _parameters(placement.wide, *self.gate_up.shape)
        self.down, self.down_scales = _parameters(placement.wide, *self.down.shape)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        names, number = self.names, self.num_routed
        if names.fused:
            yield f"{path}.gate_up_proj", self._fused_slot(self.gate_up, 2, 2)
            yield f"{path}.down_proj", self._fused_slot(self.down, 1, 1)
        else:
            for expert in range(number * self.mapping.ep_size):
                parts = (names.gate, names.up, names.down)
                own = expert - self.first
                yield from self._slots_of(own, f"{path}.{expert}", parts)
        if number < len(self.down):
            parts = ("gate_proj", "up_proj", "down_proj")
            yield from self._slots_of(number, sibling(path, names.shared), parts)

    def _fused_slot(self, parameter: torch.Tensor, shard_dim: int, parts: int) -> FusedSlot:
        mapping, by_inputs = self.mapping, parameter[: self.num_routed].transpose(1, 2)
        shape = list(by_inputs.shape)
        inner = shape[shard_dim] // parts
        shape[0] *= mapping.ep_size
        shape[shard_dim] *= mapping.moe_tp_size
        start = inner * mapping.moe_tp_rank
        return FusedSlot(
            by_inputs, tuple(shape), shard_dim, start, first_expert=self.first, parts=parts
        )

    def _slots_of(
        self, expert: int, path: str, parts: tuple[str, str, str]
    ) -> Iterator[tuple[str, WeightSlot]]:
        """expert: its index on this rank, outside of the range for another rank's. `parts`: the
        names of gate, up and down."""
        number, hidden, inner = self.down.shape
        is_here = 0 <= expert < number
        start, full = inner * self.mapping.moe_tp_rank, inner * self.mapping.moe_tp_size
        halves = zip(parts[:2], (slice(inner), slice(inner, None)), strict=True)

        def slot(
            weight: torch.Tensor, scales: torch.Tensor | None, rows: slice, part: Part
        ) -> WeightSlot:
            own = weight[expert, rows] if is_here else None
            place = own, part.shape, part.shard_dim, part.start
            if scales is None:
                return WeightSlot(*place)
            return ScaledSlot(*place, scales=scales[expert, rows] if is_here else None)

        for name, rows in halves:
            part = Part((full, hidden), 0, start)
            yield f"{path}.{name}.weight", slot(self.gate_up, self.gate_up_scales, rows, part)
        part = Part((hidden, full), 1, start)
        yield f"{path}.{parts[2]}.weight", slot(self.down, self.down_scales, slice(None), part)


def _parameters(placement: Placement, *shape: int) -> tuple[nn.Parameter, nn.Parameter | None]:
    """The weights `[E, N, K]` of experts, and if they are in FP8 their scales."""
    if placement.fp8 is None:
        return placement.parameter(*shape), None
    return scaled_parameters(*shape, device=placement.device)
