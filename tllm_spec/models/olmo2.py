"""OLMo 2: norms after attention and MLP and none before, and a norm over all heads of q or k."""

from dataclasses import replace
from typing import Any

import torch

from tllm_spec.models.config import COMMON_DEFAULTS, ModelConfig, decoder_config
from tllm_spec.models.config_file import with_defaults
from tllm_spec.models.layers import Placement
from tllm_spec.models.llama import MLP, CausalLM, DecoderLayer, layer_norm

_DEFAULTS: dict[str, Any] = COMMON_DEFAULTS | {
    "vocab_size": 50304,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "eos_token_id": 50279,
}


def read_olmo2(raw: dict[str, Any]) -> ModelConfig:
    config = decoder_config(with_defaults(raw, _DEFAULTS), reads_bias=True)
    return replace(config, qk_norm=True, norms_all_heads=True)


class Olmo2Layer(DecoderLayer):
    mlp: MLP

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        super().__init__(config, layer, placement)
        self.input_layernorm = None
        self.post_feedforward_layernorm = layer_norm(config, placement)

    def add_branches(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        self.post_attention_layernorm.add_to(hidden, self.self_attn.o_proj.summed(attended))
        self.post_feedforward_layernorm.add_to(hidden, self.mlp.forward(hidden, None))


class Olmo2ForCausalLM(CausalLM):
    layer_type = Olmo2Layer
