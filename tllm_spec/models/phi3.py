"""Phi-3 and Phi-4-mini: fused projections in the checkpoint, and a rotary embedding of some of a
head's elements."""

from dataclasses import replace
from typing import Any

from tllm_spec.models.config import COMMON_DEFAULTS, ModelConfig, decoder_config
from tllm_spec.models.config_file import with_defaults
from tllm_spec.models.rotary import rope_config, rotated_elements

_DEFAULTS: dict[str, Any] = COMMON_DEFAULTS | {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_LONGROPE = ("su", "yarn", "longrope")  # older names of the same


def read_phi3(raw: dict[str, Any]) -> ModelConfig:
    """Raises ValueError unless a part of a head's elements is rotated in pairs, of which each has a
    factor of longrope."""
    flat = with_defaults(raw, _DEFAULTS)
    fields = flat.get("rope_scaling") or flat.get("rope_parameters") or {}
    share = fields.get("partial_rotary_factor") or flat.get("partial_rotary_factor") or 1.0
    fields = fields | {"partial_rotary_factor": share}
    pairs = rotated_elements(share, flat) // 2
    if (fields.get("rope_type") or fields.get("type")) in _LONGROPE:
        fields["rope_type"] = "longrope"
        for key in ("short_factor", "long_factor"):
            if len(fields.get(key) or ()) != pairs:
                raise ValueError(
                    f"{key} has {len(fields.get(key) or ())} entries; it must have {pairs}, one "
                    "for each pair of elements that is rotated."
                )
    rope = rope_config(flat | {"rope_parameters": fields, "rope_scaling": None}, is_phi3=True)
    return replace(decoder_config(flat, rope=rope, always_slides=True), is_fused=True)
