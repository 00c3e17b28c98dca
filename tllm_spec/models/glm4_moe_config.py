"""GLM-4.5's and GLM-4.6's `config.json` in the keys that other architectures have."""

from typing import Any

from tllm_spec.models.config_file import with_defaults

GLM4_MOE = "Glm4MoeForCausalLM"
GLM4_MOE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
}


def flat_glm4_moe(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with defaults, and DeepSeek V3's way of routing."""
    return with_defaults(raw, GLM4_MOE_DEFAULTS) | {"topk_method": "noaux_tc"}
