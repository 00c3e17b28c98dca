"""Mistral 4: DeepSeek's latent attention with queries scaled as Ministral 3's, and experts that a
softmax chooses, next to a shared one."""

from dataclasses import replace
from typing import Any

import torch

from tllm_spec.kernels.attention.rotary_write import Rotary
from tllm_spec.models.config import COMMON_DEFAULTS, ModelConfig
from tllm_spec.models.config_file import with_defaults
from tllm_spec.models.deepseek import LatentAttention, read_latent
from tllm_spec.models.llama import CausalLM, DecoderLayer
from tllm_spec.models.llama4 import Llama4Model, Llama4Rotary
from tllm_spec.models.ministral3 import YARN, rope_fields, temperature_of

_DEFAULTS: dict[str, Any] = COMMON_DEFAULTS | {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "max_position_embeddings": 1048576,
    "eos_token_id": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
}
_YARN = YARN | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}


def read_mistral4(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError for groups of experts, and for what DeepSeek's models are refused for."""
    flat = with_defaults(raw, _DEFAULTS)
    if (flat.get("n_group") or 1) > 1:
        raise ValueError(f"n_group is {flat['n_group']}; Mistral 4 is served with one group.")
    fields = rope_fields(flat, _YARN)
    rotated, plain = flat["qk_rope_head_dim"], flat["qk_nope_head_dim"]
    rope = dict(fields)
    if rope.get("partial_rotary_factor") == rotated / (rotated + plain):
        del rope["partial_rotary_factor"]  # the same is said by the sizes
    own = {"rope_parameters": rope, "topk_method": "greedy", "norm_topk_prob": False}
    config = replace(read_latent(flat | own), temperature=temperature_of(rope))
    if config.moe is None:
        return config
    moe = replace(config.moe, normalise_top_k=bool(flat["norm_topk_prob"]))
    return replace(config, moe=moe)


class Mistral4Attention(LatentAttention):
    def _queries(self, q: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        assert isinstance(rotary, Llama4Rotary)
        heads = super()._queries(q, rotary)
        return heads if rotary.query_scales is None else heads.mul_(rotary.query_scales)


class Mistral4Layer(DecoderLayer):
    attention = Mistral4Attention


class Mistral4ForCausalLM(CausalLM):
    model_type = Llama4Model
    layer_type = Mistral4Layer
