"""A mixture-of-experts layer: router, experts, and the experts that every token takes."""

from dataclasses import replace

import torch
from torch import nn

from tllm_spec.kernels.experts.routing import moe_combine, moe_routing
from tllm_spec.kernels.gemm.batch_invariant_linear import batch_invariant_linear
from tllm_spec.models.experts import Experts
from tllm_spec.models.layers import RMSNorm
from tllm_spec.models.linear import ColumnLinear, Linear, RowLinear
from tllm_spec.models.module import Module, Placement
from tllm_spec.models.moe_shape import QWEN_NAMES, MoEConfig, MoENames


class Router(Linear):
    """Logits of all experts, and the correction bias."""

    def __init__(self, config: MoEConfig, placement: Placement) -> None:
        hidden, number = config.hidden_size, config.num_experts
        super().__init__(hidden, number, bias=config.has_bias, placement=placement.wide)
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
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)
        wide_x, wide_weight = x.float(), self.weight.float()
        if self.batch_invariant:
            return batch_invariant_linear(wide_x, wide_weight)
        return wide_x.mm(wide_weight.t())


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
        gate = Linear(config.hidden_size, 1, bias=False, placement=placement.wide)
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
        own = self.experts.own(experts)
        if self.config.apply_weight_on_input:
            parts = self.experts.forward(x, experts, weights)
            total = moe_combine(parts, None, taken, add_to, own)
        else:
            parts = self.experts.forward(x, experts)
            total = moe_combine(parts, weights, taken, add_to, own)
        if self.shared is not None:
            self.shared.add_to(total, x, self.shared_gate)
        return total
