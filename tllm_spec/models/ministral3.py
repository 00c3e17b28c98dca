"""Ministral 3: Mistral whose queries are scaled by their position, as in Llama 4, in all layers."""

from dataclasses import replace
from functools import partial
from typing import Any

from tllm_spec.models.config import COMMON_DEFAULTS, ModelConfig, Temperature, decoder_config
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.llama import CausalLM, DecoderLayer
from tllm_spec.models.llama4 import Llama4Attention, Llama4Model

YARN: dict[str, Any] = {
    "type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_DEFAULTS: dict[str, Any] = COMMON_DEFAULTS | {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
_YARN = YARN | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}


def read_ministral3(raw: dict[str, Any]) -> ModelConfig:
    flat = with_defaults(raw, _DEFAULTS)
    rope = rope_fields(flat, _YARN)
    config = decoder_config(flat | {"rope_parameters": rope}, always_slides=True)
    return replace(config, temperature=temperature_of(rope))


def rope_fields(flat: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The fields of the rotary embedding, in either spelling."""
    fields: dict[str, Any] = flat.get("rope_parameters") or flat.get("rope_scaling") or default
    return fields


def temperature_of(fields: dict[str, Any]) -> Temperature:
    """Raises ValueError without the keys of the queries' scale."""
    length = int(required(fields, "original_max_position_embeddings"))
    return Temperature(length, float(required(fields, "llama_4_scaling_beta")), first=0)


class Ministral3Layer(DecoderLayer):
    attention = partial(Llama4Attention, scales_all=True)


class Ministral3ForCausalLM(CausalLM):
    model_type = Llama4Model
    layer_type = Ministral3Layer
