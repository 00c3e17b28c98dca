"""gpt-oss: attention with sinks, in every second layer with a sliding window, and experts with
biases and a clamped SwiGLU."""

from collections.abc import Iterator

import torch
from torch import nn

from tllm_spec.models.config import ModelConfig
from tllm_spec.models.layers import Placement, WeightSlot
from tllm_spec.models.llama import Attention, DecoderLayer, LlamaForCausalLM
from tllm_spec.models.moe import SparseMoE
from tllm_spec.models.moe_config import GPT_OSS_NAMES


class GptOssAttention(Attention):
    """`sinks`: `[Hq]` float32, of this rank's heads (kernels/attention/attention_sinks.py)."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        self.all_heads, self.first_head = (
            config.num_heads,
            self.num_heads * placement.mapping.tp_rank,
        )
        sinks = torch.empty(self.num_heads, dtype=torch.float32, device=placement.device)
        self.sinks = nn.Parameter(sinks, requires_grad=False)

    def slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        yield f"{path}.sinks", WeightSlot(self.sinks, (self.all_heads,), 0, self.first_head)


class GptOssLayer(DecoderLayer):
    def add_attention(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self.self_attn = GptOssAttention(config, layer, placement)

    def add_mlp(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        assert config.moe is not None
        self.mlp = SparseMoE(config.moe, placement, GPT_OSS_NAMES)


class GptOssForCausalLM(LlamaForCausalLM):
    layer_type = GptOssLayer
