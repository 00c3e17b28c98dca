"""Qwen3-Next and Qwen3.5's text models: layers with a recurrent state (gated delta net) and, every
few layers, attention whose output is multiplied by a gate; an MLP, or experts next to a shared
one."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.kernels.states.gated_delta import DeltaWeights, gated_norm
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import (
    Module,
    OffsetHeadNorm,
    OffsetRMSNorm,
    Placement,
    RMSNorm,
    WeightSlot,
    in_float32,
    sibling,
)
from tllm_spec.models.linear import ColumnLinear, Linear, RowLinear
from tllm_spec.models.llama import Attention, DecoderLayer, LlamaForCausalLM
from tllm_spec.models.qwen3_next_config import DeltaConfig
from tllm_spec.models.rotary import head_order

# The gated delta net (arXiv 2412.06464): linear attention with a recurrent state, whose inputs go
# through a short causal convolution.


class _Heads:
    """Which of the checkpoint's rows this rank has: those of neighbouring key heads, and of the
    value heads that belong to them. `shape`: of the rank; `full`: of all ranks."""

    def __init__(self, delta: DeltaConfig, placement: Placement) -> None:
        self.full, self.shape = delta.heads, delta.shape(placement.mapping)
        self.rank, self.is_split = placement.mapping.tp_rank, delta.is_split

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The rank's part of the rows `[N, ...]` of all heads."""
        return rows.chunk(self.full.num_key_heads // self.shape.num_key_heads)[self.rank]

    def grouped(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Rows of a tensor that has, for each key head, parts of these sizes one after another: the
        rank's, with the first part of all heads first."""
        rows = torch.arange(self.full.num_key_heads * sum(sizes)).view(-1, sum(sizes))
        return torch.cat([part.flatten() for part in self.own(rows).split_with_sizes(sizes, 1)])

    def segments(self) -> torch.Tensor:
        """Rows of a tensor that has q of all heads, then k and v: the rank's."""
        keys = self.full.num_key_heads * self.full.key_dim
        sizes = keys, keys, self.full.num_value_heads * self.full.value_dim
        parts = torch.arange(self.full.num_channels).split_with_sizes(sizes)
        return torch.cat([self.own(part) for part in parts])


class DeltaProjection(Linear):
    """One GEMM for both projections of the checkpoint, with outputs as `gated_delta` reads them."""

    def __init__(self, hidden_size: int, heads: _Heads, placement: Placement) -> None:
        super().__init__(hidden_size, heads.shape.num_projected, bias=False, placement=placement)
        self.heads, self.hidden_size = heads, hidden_size

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        if self.heads.is_split:
            yield from self._split_slots(path)
            return
        full, num_gates = self.heads.full, 2 * self.heads.shape.num_value_heads
        each = full.num_value_heads // full.num_key_heads
        parts = {
            "in_proj_ba": (self.weight[:num_gates], (each, each)),
            "in_proj_qkvz": (
                self.weight[num_gates:],
                (full.key_dim, full.key_dim, each * full.value_dim, each * full.value_dim),
            ),
        }
        for name, (rows, sizes) in parts.items():
            shape = full.num_key_heads * sum(sizes), self.hidden_size
            order = self.heads.grouped(sizes)
            yield f"{sibling(path, name)}.weight", WeightSlot(rows, shape, order=order)

    def _split_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        heads, full = self.heads, self.heads.full
        own, number = heads.shape, full.num_value_heads
        orders = {
            "in_proj_b": heads.own(torch.arange(number)),
            "in_proj_a": heads.own(torch.arange(number)),
            "in_proj_qkv": heads.segments(),
            "in_proj_z": heads.own(torch.arange(number * full.value_dim)),
        }
        sizes = number, number, full.num_channels, number * full.value_dim
        parts = self.weight.split_with_sizes([len(order) for order in orders.values()])
        assert len(self.weight) == own.num_projected
        for (name, order), size, rows in zip(orders.items(), sizes, parts, strict=True):
            slot = WeightSlot(rows, (size, self.hidden_size), order=order)
            yield f"{sibling(path, name)}.weight", slot


class DeltaConv(Module):
    """The weight of the causal convolution, `[C, K]`."""

    def __init__(self, heads: _Heads, placement: Placement) -> None:
        super().__init__()
        self.heads = heads
        self.weight = placement.parameter(heads.shape.num_channels, heads.shape.kernel_size)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        full = self.heads.full
        shape = full.num_channels, 1, full.kernel_size
        order = self.heads.segments()
        yield f"{path}.weight", WeightSlot(self.weight.unsqueeze(1), shape, order=order)


class GatedDeltaNet(Module):
    """A layer's projections, convolution, recurrence and norm. The layer applies the output
    projection, `o_proj`, since it adds to the residual stream."""

    o_proj: RowLinear

    def __init__(
        self, config: ModelConfig, delta: DeltaConfig, layer: int, placement: Placement
    ) -> None:
        super().__init__()
        self.layer, self.heads = delta.layers.index(layer), _Heads(delta, placement)
        self.shape, wide = self.heads.shape, in_float32(placement)
        self.in_proj = DeltaProjection(config.hidden_size, self.heads, placement)
        self.conv1d = DeltaConv(self.heads, placement)
        self.A_log = wide.parameter(self.shape.num_value_heads)
        self.dt_bias = wide.parameter(self.shape.num_value_heads)
        self.weights = DeltaWeights(self.conv1d.weight, self.A_log, self.dt_bias)
        self.norm = RMSNorm(self.shape.value_dim, config.rms_norm_eps, placement)
        size = delta.heads.num_value_heads * delta.heads.value_dim
        out_proj = RowLinear(size, config.hidden_size, bias=False, placement=placement)
        self.add_under("out_proj", "o_proj", out_proj)

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        """The input of `o_proj`, `[T, Hv * Dv]`, for hidden `[T, H]`. `norm` is applied to hidden
        first."""
        projected = self.in_proj.forward(hidden, norm)
        assert context.recurrent is not None
        answers = context.recurrent.run(self.layer, projected, self.weights)
        gates = projected[:, self.shape.num_inputs :]
        return gated_norm(answers, gates, self.norm.weight, self.norm.eps)

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        """The same, for rows whose outputs are not needed."""
        assert context.recurrent is not None
        context.recurrent.run(self.layer, self.in_proj.forward(hidden, norm), self.weights)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        full = (self.heads.full.num_value_heads,)
        start = self.shape.num_value_heads * self.heads.rank
        for name, values in (("A_log", self.A_log), ("dt_bias", self.dt_bias)):
            yield f"{path}.{name}", WeightSlot(values, full, 0, start)


# The checkpoint's next-token-prediction layer (qwen3_next_mtp.py loads it).
MTP = (
    "mtp.fc.",
    "mtp.layers.0.",
    "mtp.norm.",
    "mtp.pre_fc_norm_embedding.",
    "mtp.pre_fc_norm_hidden.",
)


class GatedQKV(ColumnLinear):
    """Each head of the checkpoint's `q_proj` has queries, then gates; here all queries come first,
    then all gates, keys and values. `GatedAttention` sets `head_order`."""

    head_order: torch.Tensor

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, slot in super().slots(path):
            part = name.split(".")[-2]
            rows = torch.arange(self.parts[part]).view(-1, len(self.head_order))
            if part == "q_proj":
                order = torch.cat((rows[::2, self.head_order], rows[1::2]))
            else:
                order = rows[:, self.head_order] if part == "k_proj" else rows
            yield name, replace(slot, order=order.flatten())


class GatedAttention(Attention):
    """Attention whose output is multiplied by the sigmoid of a gate for each element."""

    projection = GatedQKV
    head_norm = OffsetHeadNorm
    query_outputs = 2

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        assert isinstance(self.qkv_proj, GatedQKV) and self.qk_norm is not None
        order = head_order(config.rope, config.head_dim)
        self.qkv_proj.head_order = self.qk_norm.order = order

    def forward(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> torch.Tensor:
        heads, gates = self._split(self.qkv_proj.forward(hidden, norm))
        own = context.groups[self.group]
        assert self.qk_norm is not None
        weights = self.qk_norm.head_weights
        attended = own.heads_backend.run(self.layer, heads, rotary, own.plan, weights)
        return attended.mul_(gates.sigmoid())

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        heads, _ = self._split(self.qkv_proj.forward(hidden, norm))
        own = context.groups[self.group]
        assert self.qk_norm is not None
        weights = self.qk_norm.head_weights
        own.heads_backend.write(self.layer, heads, rotary, own.plan, weights)

    def _split(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k and v `[T, Hq + 2 * Hkv, D]`, and the gates `[T, Hq * D]`."""
        q_size = self.num_heads * self.head_dim
        queries, gates, kv = projected.tensor_split((q_size, 2 * q_size), 1)
        heads = torch.cat((queries, kv), 1)
        return heads.view(len(heads), -1, self.head_dim), gates


class Qwen3NextLayer(DecoderLayer):
    norm_type = OffsetRMSNorm

    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        if config.delta is not None and layer in config.delta.layers:
            delta_net = GatedDeltaNet(config, config.delta, layer, placement)
            self.add_under("linear_attn", "self_attn", delta_net)
        else:
            self.self_attn = GatedAttention(config, layer, placement)


class Qwen3NextForCausalLM(LlamaForCausalLM):
    layer_type = Qwen3NextLayer

    def ignores(self, name: str) -> bool:
        has_mtp = self.config.num_nextn_layers > 0
        return (has_mtp and name.startswith(MTP)) or super().ignores(name)
