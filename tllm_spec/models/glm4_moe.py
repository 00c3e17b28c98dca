"""GLM-4.5 and GLM-4.6: attention that rotates half of a head's elements; dense first layers, then
experts, as DeepSeek V3's; layers that predict further tokens."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.deepseek import DeepseekForCausalLM, DeepseekLayer
from tllm_spec.models.layers import Placement, WeightSlot
from tllm_spec.models.linear import ColumnLinear
from tllm_spec.models.llama import Attention
from tllm_spec.models.rotary import head_order


class PartlyRotatedLinear(ColumnLinear):
    """Projections of q, k and v. `GlmAttention` sets `head_order`, as of `HeadNorm.order`."""

    head_order: torch.Tensor

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        for name, slot in super().slots(path):
            part = name.split(".")[-2]
            if part != "v_proj":
                rows = torch.arange(self.parts[part]).view(-1, len(self.head_order))
                slot = replace(slot, order=rows[:, self.head_order].flatten())
            yield name, slot


class GlmAttention(Attention):
    projection = PartlyRotatedLinear

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        assert isinstance(self.qkv_proj, PartlyRotatedLinear)
        self.qkv_proj.head_order = head_order(config.rope, config.head_dim)
        if self.qk_norm is not None:
            self.qk_norm.order = self.qkv_proj.head_order


class GlmLayer(DeepseekLayer):
    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = GlmAttention(config, layer, placement)


class Glm4MoeForCausalLM(DeepseekForCausalLM):
    layer_type = GlmLayer
