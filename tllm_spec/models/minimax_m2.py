"""MiniMax M2: a norm over all heads of q or k, a rotary embedding of some of a head's elements, and
experts chosen as DeepSeek V3's, without groups or a shared one."""

import json
from dataclasses import replace
from typing import Any

from tllm_spec.models.config import COMMON_DEFAULTS, ModelConfig, decoder_config
from tllm_spec.models.config_file import with_defaults
from tllm_spec.models.llama import MIXTRAL_NAMES
from tllm_spec.models.moe_config import moe_config, sparse_layers
from tllm_spec.models.rotary import rope_config

_DEFAULTS: dict[str, Any] = COMMON_DEFAULTS | {
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5e6,
    "eos_token_id": 200020,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}
# Keys of published files, with the only value that is served.
_SERVED: dict[str, Any] = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}


def read_minimax_m2(raw: dict[str, Any]) -> ModelConfig:
    """An expert has the size that a dense layer would have. Raises ValueError for what transformers
    does not compute either."""
    for key, served in _SERVED.items():
        if raw.get(key) not in (None, served):
            raise ValueError(f"{key} is {json.dumps(raw[key])}; served is {json.dumps(served)}.")
    flat = with_defaults(raw, _DEFAULTS)
    flat |= {"moe_intermediate_size": flat["intermediate_size"], "norm_topk_prob": True}
    flat |= {"sliding_window": None}  # transformers has none whatever the key says
    if flat.get("rotary_dim"):
        flat.setdefault("partial_rotary_factor", flat["rotary_dim"] / flat["head_dim"])
    moe = replace(
        moe_config(flat),
        scoring="sigmoid",
        has_correction_bias=True,
        float32_router=True,
        names=replace(MIXTRAL_NAMES, has_bias_beside=True),
    )
    config = decoder_config(flat, rope=rope_config(flat, may_be_partial=True))
    config = replace(config, qk_norm=True, norms_all_heads=True)
    return replace(config, moe=moe, sparse_layers=sparse_layers(flat))
