"""Qwen3-Next and Qwen3.5's text models: layers with a recurrent state (gated delta net) and, every
few layers, attention whose output is multiplied by a gate; an MLP, or experts next to a shared
one."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tllm_spec.attention.interface import ForwardContext
from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.gated_delta_net import GatedDeltaNet
from tllm_spec.models.layers import OffsetHeadNorm, OffsetRMSNorm, RMSNorm
from tllm_spec.models.linear import ColumnLinear
from tllm_spec.models.llama import Attention, DecoderLayer, LlamaForCausalLM
from tllm_spec.models.module import Placement, WeightSlot
from tllm_spec.models.rotary import head_order

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
        attended = own.backend.run(self.layer, heads, rotary, own.plan, weights)
        return attended.mul_(gates.sigmoid())

    def write(
        self, hidden: torch.Tensor, norm: RMSNorm | None, rotary: Rotary, context: ForwardContext
    ) -> None:
        heads, _ = self._split(self.qkv_proj.forward(hidden, norm))
        own = context.groups[self.group]
        assert self.qk_norm is not None
        weights = self.qk_norm.head_weights
        own.backend.write(self.layer, heads, rotary, own.plan, weights)

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
