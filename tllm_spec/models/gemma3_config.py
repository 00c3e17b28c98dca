"""What Gemma 3's text model adds to a `config.json`, and the same file in the keys that other
architectures have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.rotary import RopeConfig, rope_config

GEMMA3 = "Gemma3ForCausalLM"
ACTIVATION = "gelu_pytorch_tanh"
GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": ACTIVATION,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
SLIDING, FULL = "sliding_attention", "full_attention"
# What transformers' model does not compute, or what is not served.
_OFF = ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention")


@dataclass(frozen=True)
class Gemma3Config:
    """Two rotary embeddings, and the scale of attention."""

    local_layers: frozenset[int]
    """Those with `local_rope`. They also have the sliding window."""
    local_rope: RopeConfig
    query_scale: float
    """Factor of the scores before the softmax."""


def flat_gemma3(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with defaults, and the rotary embedding of layers that see all keys. Raises
    ValueError for what is not served."""
    flat = with_defaults(raw, GEMMA3_DEFAULTS)
    for key in _OFF:
        if flat.get(key):
            raise ValueError(f"{key} is {flat[key]}; Gemma 3 is served without it.")
    if (activation := flat["hidden_activation"]) != ACTIVATION:
        raise ValueError(f"hidden_activation is {activation!r}; only {ACTIVATION!r} is served.")
    flat["hidden_act"] = activation
    flat["use_sliding_window"] = None
    if not flat.get("layer_types"):
        period = flat.get("sliding_window_pattern") or flat.get("_sliding_window_pattern") or 6
        numbers = range(1, required(flat, "num_hidden_layers") + 1)
        flat["layer_types"] = [SLIDING if number % period else FULL for number in numbers]
    flat["local_rope_parameters"] = _rope_parameters(flat, SLIDING, "rope_local_base_freq")
    scaling = flat.pop("rope_scaling", None) or {}
    flat["rope_parameters"] = _rope_parameters(flat, FULL, "rope_theta") | scaling
    return flat


def _rope_parameters(flat: Mapping[str, Any], kind: str, theta: str) -> dict[str, Any]:
    """The parameters of a kind of layers, in transformers' newer spelling."""
    fields = (flat.get("rope_parameters") or {}).get(kind) or {}
    return {"rope_type": "default", "rope_theta": flat[theta]} | fields


def gemma3_config(flat: dict[str, Any]) -> Gemma3Config:
    """`flat` as `flat_gemma3` returns it."""
    types = enumerate(flat["layer_types"])
    return Gemma3Config(
        local_layers=frozenset(layer for layer, kind in types if kind == SLIDING),
        local_rope=rope_config(flat | {"rope_parameters": flat["local_rope_parameters"]}),
        query_scale=float(flat["query_pre_attn_scalar"]) ** -0.5,
    )
