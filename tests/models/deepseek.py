"""Tiny random DeepSeek checkpoints."""

from pathlib import Path
from typing import Any

from tests.models.helpers import save_checkpoint

LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
DEEPSEEK: dict[str, Any] = LATENT | {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
V3: dict[str, Any] = DEEPSEEK | {"n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 0}
# Many heads, so that few scores are 0, and fewer keys than most rows see.
V32 = V3 | {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 8}
GLM5: dict[str, Any] = V32 | {"n_group": 1, "topk_group": 1, "v_head_dim": 16}
GLM5 |= {"indexer_types": ["full", "shared", "full"], "index_share_for_mtp_iteration": True}
MSCALE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
}
# The queries' scale grows at every tenth position.
MISTRAL4: dict[str, Any] = DEEPSEEK | {"first_k_dense_replace": 0}
MISTRAL4["rope_parameters"] = MSCALE_YARN | {
    "original_max_position_embeddings": 10,
    "llama_4_scaling_beta": 0.7,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek v2": ("DeepseekV2", DEEPSEEK),
    "deepseek v2, groups": ("DeepseekV2", DEEPSEEK | V2_GROUPS | {"routed_scaling_factor": 4.0}),
    "deepseek v2, no q_lora": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "deepseek v2, yarn": ("DeepseekV2", DEEPSEEK | {"rope_parameters": MSCALE_YARN}),
    "deepseek v3": ("DeepseekV3", V3),
    "deepseek v3, two shared experts": ("DeepseekV3", V3 | {"n_shared_experts": 2}),
    "deepseek v3, all dense": ("DeepseekV3", V3 | {"first_k_dense_replace": 3}),
    "deepseek v3, no q_lora": ("DeepseekV3", V3 | {"q_lora_rank": None}),
    "deepseek v3, halves": ("DeepseekV3", V3 | {"rope_interleave": False}),
    "deepseek v3, yarn": ("DeepseekV3", V3 | {"rope_parameters": MSCALE_YARN}),
    "deepseek v3, one group": ("DeepseekV3", V3 | {"n_group": 1, "topk_group": 1}),
    "deepseek v3.2": ("DeepseekV32", V32 | {"rope_parameters": MSCALE_YARN}),
    "deepseek v3.2, one key": ("DeepseekV32", V32 | {"index_topk": 1}),
    "glm 5": ("GlmMoeDsa", GLM5),
}


def save_deepseek(folder: Path, architecture: str, **config: Any) -> Any:
    """A random model of V2, V3, V3.2 or GLM-5 with YaRN; returns transformers' model."""
    families = {"DeepseekV3": V3, "DeepseekV32": V32, "GlmMoeDsa": GLM5}
    own = families.get(architecture, DEEPSEEK | V2_GROUPS)
    return save_checkpoint(
        folder, architecture, **(own | {"rope_parameters": MSCALE_YARN} | config)
    )
