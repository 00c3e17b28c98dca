"""A mixture-of-experts layer: router, experts, and the experts that every token takes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from tllm_spec.kernels.batch_invariant_linear import batch_invariant_linear
from tllm_spec.kernels.grouped_gemm import block_rows_of, down, gate_up_silu
from tllm_spec.kernels.moe_combine import moe_combine
from tllm_spec.kernels.moe_permute import moe_permute
from tllm_spec.kernels.moe_routing import RoutingRule, Scoring, moe_routing
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.linear import ColumnLinear, Linear, RowLinear
from tllm_spec.models.module import Module, Placement, WeightSlot, sibling


@dataclass(frozen=True)
class MoEConfig:
    """The shape of a layer, and how its router chooses."""

    hidden_size: int
    num_experts: int
    top_k: int
    intermediate_size: int
    """Of one expert."""
    scoring: Scoring = "softmax"
    normalise_top_k: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    """Groups of experts that a token may take experts from (`RoutingRule`)."""
    has_correction_bias: bool = False
    """DeepSeek V3: `e_score_correction_bias` is added to the scores for the choice."""
    shared_intermediate_size: int = 0
    """Of the expert that every token takes; 0: there is none."""
    shared_gate: bool = False
    """Qwen2-MoE: the shared expert's output is multiplied by the sigmoid of one more output."""
    apply_weight_on_input: bool = False
    """Llama 4: an expert's weight multiplies its input instead of its output."""
    float32_router: bool = False
    """DeepSeek: a model in 16 bits computes its router's logits in float32."""
    fuses_shared: bool = True
    """Whether the shared expert may be computed as one more routed expert."""

    @property
    def num_shared(self) -> int:
        """1 if the shared expert is computed as one more routed expert, which every token takes
        with weight 1: it saves the launches of a layer of its own. Otherwise 0."""
        has_size = self.shared_intermediate_size == self.intermediate_size
        return int(has_size and not self.shared_gate and self.fuses_shared)

    @property
    def routing(self) -> RoutingRule:
        return RoutingRule(
            top_k=self.top_k,
            scoring=self.scoring,
            normalises=self.normalise_top_k,
            scale=self.routed_scaling_factor,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            num_shared=self.num_shared,
        )

    @property
    def row_elements(self) -> int:
        """Elements of the activations that a token has at a time in addition to hidden states: what
        its experts compute and put out, or the shared expert."""
        taken = self.routing.num_taken * (self.intermediate_size + self.hidden_size)
        return taken + (0 if self.num_shared else 3 * self.shared_intermediate_size)


@dataclass(frozen=True)
class MoENames:
    """The checkpoint's names below the layer's. With `fused`, all experts are one tensor of gates
    and ups `[E, H, 2 * I]` and one of downs `[E, I, H]`, as in Llama 4."""

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    fused: bool = False


QWEN_NAMES = MoENames()
DEEPSEEK_NAMES = MoENames(shared="shared_experts")
MIXTRAL_NAMES = MoENames(gate="w1", up="w3", down="w2")
LLAMA4_NAMES = MoENames(router="router", fused=True)


class Router(Linear):
    """Logits of all experts, and the correction bias."""

    def __init__(self, config: MoEConfig, placement: Placement) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False, placement=placement)
        self.rule, self.in_float32 = config.routing, config.float32_router
        values = torch.empty(config.num_experts, dtype=torch.float32, device=placement.device)
        self.e_score_correction_bias = (
            nn.Parameter(values, requires_grad=False) if config.has_correction_bias else None
        )

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts `[T, k]` int32 and weights `[T, k]` float32 for x `[T, H]`; k includes
        `num_shared`."""
        return moe_routing(self.logits(x), self.rule, self.e_score_correction_bias)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, E]`, of x's dtype or float32."""
        if not self.in_float32 or x.dtype == torch.float32:
            return self.forward(x)
        if x.is_cuda and not self.batch_invariant:
            return torch.mm(x, self.matrix, out_dtype=torch.float32)
        wide_x, wide_weight = x.float(), self.weight.float()
        if self.batch_invariant:
            return batch_invariant_linear(wide_x, wide_weight)
        return wide_x.mm(wide_weight.t())


@dataclass(frozen=True)
class FusedSlot(WeightSlot):
    """All experts in one tensor `[E, …]`: a rank takes its experts, and its slice of each of the
    `parts` that lie side by side in `shard_dim`."""

    first_expert: int = 0
    parts: int = 1

    def load(self, tensor: torch.Tensor) -> None:
        assert self.destination is not None and self.shard_dim is not None
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
        self.gate_up = placement.parameter(number, 2 * inner, hidden)
        self.down = placement.parameter(number, hidden, inner)

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
            return down(gate_up_silu(x, self.gate_up, rows, input_weights), self.down, rows)
        experts = experts - self.first
        is_elsewhere = (experts < 0) | (experts >= number)
        # As one more expert, which sorts last, and whose blocks are left out.
        experts = experts.masked_fill(is_elsewhere, number)
        rows = moe_permute(experts, number + 1, block_rows)
        left_out = (is_elsewhere.sum(dtype=torch.int32) + (block_rows - 1)) // block_rows
        rows = replace(rows, num_blocks=rows.num_blocks - left_out)
        parts = down(gate_up_silu(x, self.gate_up, rows, input_weights), self.down, rows)
        return parts.masked_fill_(is_elsewhere.view(-1, 1), 0)

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
        gate = self.gate_up[expert, :inner] if is_here else None
        up = self.gate_up[expert, inner:] if is_here else None
        down_weight = self.down[expert] if is_here else None
        start, full = inner * self.mapping.moe_tp_rank, inner * self.mapping.moe_tp_size
        for name, rows in zip(parts[:2], (gate, up), strict=True):
            yield f"{path}.{name}.weight", WeightSlot(rows, (full, hidden), 0, start)
        yield f"{path}.{parts[2]}.weight", WeightSlot(down_weight, (hidden, full), 1, start)


class SharedExpert(Module):
    """SwiGLU that every token takes."""

    def __init__(self, config: MoEConfig, placement: Placement) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.shared_intermediate_size
        parts = {"gate_proj": inner, "up_proj": inner}
        self.gate_up_proj = ColumnLinear(hidden, parts, bias=False, placement=placement)
        self.down_proj = RowLinear(inner, hidden, bias=False, placement=placement)

    def add_to(self, total: torch.Tensor, x: torch.Tensor, gate: Linear | None) -> None:
        """Add this rank's part of the output for x `[T, H]` to `total` `[T, H]` in place, times the
        sigmoid of `gate`'s output `[T, 1]`."""
        inner = self.gate_up_proj.gated(x)
        if gate is not None:
            inner = inner * gate.forward(x).sigmoid()
        self.down_proj.add_part_to(total, inner)


class SparseMoE(Module):
    """Top-k routed experts, and a shared expert if the config has one. `shared`: that expert, where
    it is a layer of its own."""

    router: Router
    experts: Experts
    shared: SharedExpert | None
    shared_gate: Linear | None

    def __init__(
        self, config: MoEConfig, placement: Placement, names: MoENames = QWEN_NAMES
    ) -> None:
        super().__init__()
        if placement.mapping.ep_size > 1:  # every rank needs a slice of the shared expert
            config = replace(config, fuses_shared=False)
        self.config, self.communicator = config, placement.communicator
        self.is_shared = placement.mapping.tp_size > 1
        self.add_under(names.router, "router", Router(config, placement))
        self.experts = Experts(config, placement, names)
        has_layer = config.shared_intermediate_size > 0 and not config.num_shared
        shared = SharedExpert(config, placement) if has_layer else None
        self.add_under(names.shared, "shared", shared)
        gate = Linear(config.hidden_size, 1, bias=False, placement=placement)
        self.add_under(names.shared_gate, "shared_gate", gate if config.shared_gate else None)

    def add_to(self, hidden: torch.Tensor, norm: RMSNorm) -> None:
        """Add the output for `norm(hidden)` to hidden `[T, H]` in place."""
        x = norm.forward(hidden)
        if self.is_shared:
            self.communicator.all_reduce_into(hidden, self._output(x, None))
        else:
            self._output(x, hidden)

    def _output(self, x: torch.Tensor, add_to: torch.Tensor | None) -> torch.Tensor:
        """This rank's part, added to `add_to` if given."""
        (experts, weights), taken = self.router.route(x), self.router.rule.num_taken
        if self.config.apply_weight_on_input:
            parts = self.experts.forward(x, experts, weights)
            total = moe_combine(parts, None, taken, add_to)
        else:
            parts = self.experts.forward(x, experts)
            total = moe_combine(parts, weights, taken, add_to)
        if self.shared is not None:
            self.shared.add_to(total, x, self.shared_gate)
        return total
