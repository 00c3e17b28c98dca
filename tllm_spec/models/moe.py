"""A mixture-of-experts layer: router, experts, and the experts that every token takes."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from tllm_spec.kernels.dispatch import has_kernels
from tllm_spec.kernels.experts.few_tokens import (
    MAX_TOKENS,
    RoutedTokens,
    RouterWeights,
    route_few,
)
from tllm_spec.kernels.experts.grouped_gemm import block_rows_of
from tllm_spec.kernels.experts.permute import ExpertRows, moe_permute
from tllm_spec.kernels.experts.routing import OwnExperts, moe_combine, moe_routing
from tllm_spec.kernels.gemm.norms import NormWeight, rms_norm
from tllm_spec.models.formats.stacked_weight import StackedWeight
from tllm_spec.models.formats.weight_format import Part
from tllm_spec.models.layers import Module, Placement, RMSNorm, WeightSlot, sibling
from tllm_spec.models.linear import ColumnLinear, Linear, RowLinear
from tllm_spec.models.moe_config import MoEConfig

# The experts of a mixture-of-experts layer.


class Experts(Module):
    """A rank has some of the experts, and of these a slice of the intermediate size: all experts
    without expert parallelism, whole ones with nothing else. The last may be the shared one."""

    gate_up_weights: StackedWeight
    down_weights: StackedWeight

    def __init__(self, config: MoEConfig, placement: Placement) -> None:
        super().__init__()
        self.names, self.mapping = config.names, placement.mapping
        self.num_routed = self.mapping.shard_experts(config.num_experts)
        hidden, number = config.hidden_size, self.num_routed + config.num_shared
        inner = self.mapping.shard_expert(config.intermediate_size)
        self.first = self.num_routed * self.mapping.ep_rank
        self.shape = number, hidden, inner
        self.gates = {"limit": config.swiglu_limit, "activation": config.activation}
        self.gate_up_bias = placement.parameter(number, 2 * inner) if config.has_bias else None
        self.down_bias = placement.parameter(number, hidden) if config.has_bias else None
        if self.down_bias is not None and self.mapping.moe_tp_rank > 0:
            self.down_bias.zero_()  # the first rank of a slice adds it
        self._create(placement)

    def _create(self, placement: Placement) -> None:
        number, hidden, inner = self.shape
        full = inner * self.mapping.moe_tp_size
        shape, bias = (number, 2 * inner, hidden), self.gate_up_bias
        self._use("gate_up", StackedWeight(shape, placement, bias, gated=True))
        own, bias = placement.of_inputs(inner, full), self.down_bias
        self._use("down", StackedWeight((number, hidden, inner), own, bias, gated=False))

    def _use(self, name: str, weights: StackedWeight) -> None:
        """Replaces one of the two layers, with its tensors."""
        if f"{name}_weights" in self.__dict__:
            for each, _ in getattr(self, f"{name}_weights").parameters(name):
                setattr(self, each, None)
        setattr(self, f"{name}_weights", weights)
        for each, parameter in weights.parameters(name):
            setattr(self, each, parameter)

    def forward(
        self, x: torch.Tensor, rows: ExpertRows, input_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Each assignment's output, `[T * k, H]`, for x `[T, H]` and its rows; that of another
        rank's expert is not defined. `input_weights` `[T, k]` multiply the inputs."""
        inner = self.gate_up_weights.gated(x, rows, input_weights, **self.gates)
        return self.down_weights.multiply(inner, rows)

    def sorted(self, x: torch.Tensor, experts: torch.Tensor) -> ExpertRows:
        """The rows of x `[T, H]` with the experts `[T, k]`."""
        number, first = self.shape[0], None if self.mapping.ep_size == 1 else self.first
        kind, num_sums = self.gate_up_weights.kind, self.gate_up_weights.operands.num_sums(x.dtype)
        block_rows = block_rows_of(experts.numel(), number, x.dtype, x.device, kind, num_sums)
        return moe_permute(experts, number, block_rows, first)

    def own(self, experts: torch.Tensor) -> OwnExperts | None:
        """Which outputs for `experts` `[T, k]` are defined; None: all."""
        if self.mapping.ep_size == 1:
            return None
        return OwnExperts(experts, self.first, self.num_routed)

    def widen(self, placement: Placement) -> None:
        self._create(placement.wide)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        names, number = self.names, self.num_routed
        for expert in range(number * self.mapping.ep_size):
            parts = (names.gate, names.up, names.down)
            yield from self._slots_of(expert - self.first, f"{path}.{expert}", parts)

    def shared_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        """Those of the shared expert, which is the last, if there is one."""
        if (number := self.num_routed) < self.shape[0]:
            yield from self._slots_of(number, path, ("gate_proj", "up_proj", "down_proj"))

    def _slots_of(
        self, expert: int, path: str, parts: tuple[str, str, str]
    ) -> Iterator[tuple[str, WeightSlot]]:
        """expert: its index on this rank, outside of the range for another rank's. `parts`: the
        names of gate, up and down."""
        number, hidden, inner = self.shape
        is_here = 0 <= expert < number
        start, full = inner * self.mapping.moe_tp_rank, inner * self.mapping.moe_tp_size
        for name, rows in zip(parts[:2], (slice(inner), slice(inner, None)), strict=True):
            module, own = f"{path}.{name}", (expert, rows) if is_here else None
            part = Part((full, hidden), 0, start)
            yield f"{module}.weight", self.gate_up_weights.form.slot(module, own, part)
            if self.gate_up_bias is not None:
                bias = None if own is None else self.gate_up_bias[own]
                yield f"{module}.bias", WeightSlot(bias, (full,), 0, start)
        module, own = f"{path}.{parts[2]}", (expert, slice(None)) if is_here else None
        part = Part((hidden, full), 1, start)
        yield f"{module}.weight", self.down_weights.form.slot(module, own, part)
        if self.down_bias is not None:
            bias = self.down_bias[expert] if is_here and start == 0 else None
            yield f"{module}.bias", WeightSlot(bias, (hidden,))


class Router(Linear):
    """Logits of all experts, and of the shared one's gate if it is one of them; the correction
    bias."""

    def __init__(self, config: MoEConfig, placement: Placement) -> None:
        rule, hidden = config.routing, config.hidden_size
        number = config.num_experts + rule.gates_shared
        super().__init__(hidden, number, bias=config.has_bias, placement=placement.wide)
        self.rule, self.in_float32 = rule, config.float32_router
        values = torch.empty(config.num_experts, dtype=torch.float32, device=placement.memory)
        self.e_score_correction_bias = (
            nn.Parameter(values, requires_grad=False) if config.has_correction_bias else None
        )
        self.num_arrived = torch.zeros(MAX_TOKENS, dtype=torch.int32, device=placement.memory)
        self.names, self.num_experts = config.names, config.num_experts

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        own, bias = dict(super().slots(path)), "e_score_correction_bias"
        if self.rule.gates_shared:
            number, inputs = self.weight_format.shape
            gate = sibling(path, self.names.shared_gate)
            for module, first, end in ((path, 0, number - 1), (gate, number - 1, number)):
                part = Part((end - first, inputs))
                own[f"{module}.weight"] = self.weight_format.slot(module, slice(first, end), part)
        if self.names.has_bias_beside:
            own[sibling(path, bias)] = own.pop(f"{path}.{bias}")
        yield from own.items()

    def tokens(
        self,
        hidden: torch.Tensor,
        norm: RMSNorm,
        own: Experts,
        apart: NormWeight | None = None,
        factors: torch.Tensor | None = None,
    ) -> RoutedTokens:
        """The tokens `norm(hidden)` with their experts. apart: another norm, of what the router
        reads. factors: as of `route`."""
        if self.serves_few(hidden):
            both = (norm.kernel_weight,) if apart is None else (apart, factors, norm.kernel_weight)
            routed = self.route_few(hidden, *both)
            if len(hidden) == 1 == own.mapping.ep_size:
                return routed
            x, experts, weights = routed.x, routed.rows.experts, routed.weights
        else:
            x = norm.forward(hidden)
            read = x if apart is None else rms_norm(hidden, apart.weight, apart.eps)
            experts, weights = self.route(read, factors)
        return RoutedTokens(x, weights, own.sorted(x, experts))

    def route(
        self, x: torch.Tensor, factors: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts `[T, k]` int32 and weights `[T, k]` float32 for x `[T, H]`; k includes
        `num_shared`. factors: see `moe_routing`."""
        return moe_routing(self.logits(x), self.rule, self.e_score_correction_bias, factors)

    def serves_few(self, hidden: torch.Tensor) -> bool:
        """Whether `route_few` serves these rows."""
        is_few = 0 < len(hidden) <= MAX_TOKENS and has_kernels(hidden.device)
        return is_few and not (self.batch_invariant or self.weight_format.acts)

    def route_few(
        self,
        hidden: torch.Tensor,
        norm: NormWeight,
        factors: torch.Tensor | None = None,
        inputs: NormWeight | None = None,
    ) -> RoutedTokens:
        """`route` for `norm(hidden)`, of up to MAX_TOKENS tokens. inputs: see `RouterWeights`."""
        dtype = torch.float32 if self.in_float32 else hidden.dtype
        weight = self.weight.contiguous()  # a CPU's has adjacent outputs
        own = weight, self.bias, self.e_score_correction_bias, self.rule, dtype, self.num_arrived
        return route_few(hidden, norm, RouterWeights(*own, factors, inputs))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, E]`, of x's dtype or float32."""
        return self.unrounded(x) if self.in_float32 else self.weight_format.multiply(x)


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

    def __init__(self, config: MoEConfig, placement: Placement) -> None:
        super().__init__()
        self.communicator = placement.communicator
        self.is_shared = placement.mapping.tp_size > 1
        if placement.mapping.ep_size > 1:  # every rank needs a slice of the shared expert
            config = replace(config, fuses_shared=False)
        self._create(config, placement)

    def _create(self, config: MoEConfig, placement: Placement) -> None:
        self.config, names = config, config.names
        self.add_under(names.router, "router", Router(config, placement))
        self.experts = Experts(config, placement)
        has_layer = config.shared_intermediate_size > 0 and not config.num_shared
        shared = SharedExpert(config, placement) if has_layer else None
        self.add_under(names.shared, "shared", shared)
        gate = Linear(config.hidden_size, 1, bias=False, placement=placement.wide)
        has_gate = has_layer and config.shared_gate
        self.add_under(names.shared_gate, "shared_gate", gate if has_gate else None)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        prefix = f"{path}." if path else ""
        return self.experts.shared_slots(prefix + self.config.names.shared)

    def widen(self, placement: Placement) -> None:
        """The shared expert becomes a layer of its own, since the others may be quantised."""
        self._create(replace(self.config, fuses_shared=False), placement)

    def add_to(self, hidden: torch.Tensor, norm: RMSNorm) -> None:
        """Add the output for `norm(hidden)` to hidden `[T, H]` in place."""
        if self.is_shared:
            self.communicator.all_reduce_into(hidden, self._output(hidden, norm, None))
        else:
            self._output(hidden, norm, hidden)

    def _output(
        self, hidden: torch.Tensor, norm: RMSNorm, add_to: torch.Tensor | None
    ) -> torch.Tensor:
        """This rank's part, added to `add_to` if given."""
        routed, taken = self.router.tokens(hidden, norm, self.experts), self.router.rule.num_taken
        x, weights, rows = routed.x, routed.weights, routed.rows
        own, on_input = self.experts.own(rows.experts), self.config.apply_weight_on_input
        parts = self.experts.forward(x, rows, weights if on_input else None)
        total = moe_combine(parts, None if on_input else weights, taken, add_to, own)
        if self.shared is not None:
            self.shared.add_to(total, x, self.shared_gate)
        return total
