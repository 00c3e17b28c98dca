"""What Llama 4's text model adds to a `config.json`, and the same file in the keys that other
architectures have."""

from dataclasses import dataclass
from typing import Any

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
}


@dataclass(frozen=True)
class Llama4Config:
    """Layers without a rotary embedding, and the positions from which attention is not plain."""

    nope_layers: frozenset[int]
    chunk_size: int | None
    """The layers with a rotary embedding attend within chunks of so many tokens."""
    floor_scale: int | None
    """The layers without one scale the queries from position `floor_scale - 1` on."""

    def check_positions(self, max_positions: int) -> None:
        """Raises ValueError if a request could be so long that attention is not plain."""
        limits = {}
        if self.chunk_size is not None:
            limits["attention_chunk_size"] = (self.chunk_size, self.chunk_size)
        if self.floor_scale is not None and self.nope_layers:
            limits["floor_scale of the attention temperature"] = (
                self.floor_scale,
                self.floor_scale - 1,
            )
        for key, (value, longest) in limits.items():
            if longest < max_positions:
                raise ValueError(
                    f"{key} is {value}, which changes attention within the {max_positions} "
                    f"positions asked for and is not served; lower max_seq_len to {longest} or "
                    "below."
                )


def flat_llama4(raw: dict[str, Any]) -> dict[str, Any]:
    """The text model's keys at the top, with defaults, and sizes under the names that Qwen2-MoE
    has. Raises ValueError for layer types that do not follow from the rotary layers."""
    flat = LLAMA4_DEFAULTS | raw | (raw.get("text_config") or {})
    flat["architectures"] = raw["architectures"]
    nope = nope_layers(flat)
    expected = [
        "full_attention" if layer in nope else "chunked_attention"
        for layer in range(int(flat["num_hidden_layers"]))
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
    `no_rope_layer_interval`-th."""
    number, interval = int(flat["num_hidden_layers"]), int(flat["no_rope_layer_interval"])
    flags = flat.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(number)]
    return frozenset(layer for layer in range(number) if not flags[layer])


def llama4_config(flat: dict[str, Any]) -> Llama4Config:
    """`flat` as `flat_llama4` returns it."""
    chunk = flat["attention_chunk_size"]
    return Llama4Config(
        nope_layers=nope_layers(flat),
        chunk_size=None if chunk is None else int(chunk),
        floor_scale=int(flat["floor_scale"]) if flat["attn_temperature_tuning"] else None,
    )
