"""What Llama 4's text model adds to a `config.json`, and the same file in the keys that other
architectures have."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from tllm_spec.models.config_file import required, with_defaults

LLAMA4 = "Llama4ForCausalLM"
LLAMA4_DEFAULTS: dict[str, Any] = {
    "eos_token_id": 2,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "no_rope_layer_interval": 4,
    "use_qk_norm": True,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}


@dataclass(frozen=True)
class Temperature:
    """In layers without a rotary embedding the queries at position p are scaled by
    log(floor((p + 1) / floor_scale) + 1) * attn_scale + 1 (transformers'
    `Llama4TextAttention`)."""

    floor_scale: int
    attn_scale: float

    def table(self, max_positions: int) -> torch.Tensor:
        """The factors of each value of the floor, `[N, 1, 1]` float32."""
        floors = torch.arange(max_positions // self.floor_scale + 1, dtype=torch.float32)
        return (torch.log1p(floors) * self.attn_scale + 1.0).view(-1, 1, 1)


@dataclass(frozen=True)
class Llama4Config:
    """What layers with a rotary embedding do, and those without."""

    nope_layers: frozenset[int]
    """Those without."""
    chunk_size: int | None
    """The layers with a rotary embedding attend within chunks of so many positions."""
    temperature: Temperature | None
    """How the layers without a rotary embedding scale their queries."""

    def within(self, max_positions: int) -> "Llama4Config":
        """The same for so many positions: without chunks and temperature where they change
        nothing."""
        chunk, temperature = self.chunk_size, self.temperature
        if chunk is not None and chunk >= max_positions:
            chunk = None
        if temperature is not None and temperature.floor_scale > max_positions:
            temperature = None
        return replace(self, chunk_size=chunk, temperature=temperature)


def flat_llama4(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with defaults, and sizes under the names that Qwen2-MoE has. Raises
    ValueError for layer types that do not follow from the rotary layers."""
    flat = with_defaults(raw, LLAMA4_DEFAULTS)
    nope = nope_layers(flat)
    expected = [
        "full_attention" if layer in nope else "chunked_attention"
        for layer in range(required(flat, "num_hidden_layers"))
    ]
    if (types := flat.pop("layer_types", None)) and types != expected:
        raise ValueError(
            f"layer_types is {types}; served is full_attention in the layers without a rotary "
            "embedding and chunked_attention in the others."
        )
    step, inner = int(flat["interleave_moe_layer_step"]), flat["intermediate_size"]
    if flat.get("moe_layers") is None:
        flat["moe_layers"] = list(range(step - 1, int(flat["num_hidden_layers"]), step))
    flat["moe_intermediate_size"] = flat["shared_expert_intermediate_size"] = inner
    flat["intermediate_size"] = flat["intermediate_size_mlp"]
    return flat


def nope_layers(flat: dict[str, Any]) -> frozenset[int]:
    """Layers without a rotary embedding: `no_rope_layers` has 0 for them, or every
    `no_rope_layer_interval`-th. Raises ValueError if it has not one for each layer."""
    number, interval = required(flat, "num_hidden_layers"), flat["no_rope_layer_interval"]
    flags = flat.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(number)]
    if len(flags) != number:
        raise ValueError(f"no_rope_layers has {len(flags)} entries for {number} layers.")
    return frozenset(layer for layer in range(number) if not flags[layer])


def llama4_config(flat: dict[str, Any]) -> Llama4Config:
    """`flat` as `flat_llama4` returns it."""
    chunk = flat["attention_chunk_size"]
    temperature = Temperature(int(flat["floor_scale"]), float(flat["attn_scale"]))
    return Llama4Config(
        nope_layers=nope_layers(flat),
        chunk_size=None if chunk is None else int(chunk),
        temperature=temperature if flat["attn_temperature_tuning"] else None,
    )
