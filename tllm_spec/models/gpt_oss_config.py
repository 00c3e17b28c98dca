"""gpt-oss's `config.json` in the keys that other architectures have."""

from typing import Any

from tllm_spec.models.config_file import required, with_defaults

GPT_OSS = "GptOssForCausalLM"
GPT_OSS_DEFAULTS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def flat_gpt_oss(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with defaults, a type for each layer, and a rotary embedding. Raises
    ValueError for another activation than the published models'."""
    flat = with_defaults(raw, GPT_OSS_DEFAULTS)
    alpha = GPT_OSS_DEFAULTS["swiglu_alpha"]
    if flat["swiglu_alpha"] != alpha:
        raise ValueError(f"swiglu_alpha is {flat['swiglu_alpha']}; only {alpha} is served.")
    if not flat.get("layer_types"):
        kinds = "sliding_attention", "full_attention"
        flat["layer_types"] = [
            kinds[layer % 2] for layer in range(required(flat, "num_hidden_layers"))
        ]
    if not (flat.get("rope_parameters") or flat.get("rope_scaling")):
        flat["rope_parameters"] = _YARN
    return flat | {"use_sliding_window": None}
