"""The mixture of experts that a Hugging Face `config.json` describes."""

from typing import Any

from tllm_spec.models.config_file import required
from tllm_spec.models.gpt_oss_config import GPT_OSS
from tllm_spec.models.llama4_config import LLAMA4
from tllm_spec.models.moe_shape import MoEConfig
from tllm_spec.models.qwen3_next_config import DELTA_WITH_EXPERTS

# The defaults of each architecture's configuration class in transformers.
MOE_DEFAULTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2MoeForCausalLM": {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "Qwen3MoeForCausalLM": {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    # `flat_gpt_oss`, `flat_qwen3_next` and `flat_llama4` fill in what is missing.
    GPT_OSS: {},
    **{name: {} for name in DELTA_WITH_EXPERTS},
    LLAMA4: {},
}


def moe_config(architecture: str, raw: dict[str, Any]) -> MoEConfig | None:
    """None for a dense architecture. `raw` has the defaults filled in.

    Raises:
        ValueError: more experts per token than experts.
    """
    if architecture not in MOE_DEFAULTS:
        return None
    is_gpt_oss = architecture == GPT_OSS
    has_one_size = is_gpt_oss or architecture == "MixtralForCausalLM"
    size = raw["intermediate_size" if has_one_size else "moe_intermediate_size"]
    is_llama4 = architecture == LLAMA4
    has_gate = architecture in ("Qwen2MoeForCausalLM", *DELTA_WITH_EXPERTS)
    has_shared = is_llama4 or has_gate
    config = MoEConfig(
        hidden_size=int(raw["hidden_size"]),
        num_experts=_num_experts(raw),
        top_k=int(raw["num_experts_per_tok"]),
        intermediate_size=int(size),
        normalise_top_k=has_one_size or bool(raw.get("norm_topk_prob")),
        shared_intermediate_size=int(raw["shared_expert_intermediate_size"]) if has_shared else 0,
        shared_gate=has_gate,
        scoring="sigmoid" if is_llama4 else "softmax",
        apply_weight_on_input=is_llama4,
        has_bias=is_gpt_oss,
        swiglu_limit=float(raw["swiglu_limit"]) if is_gpt_oss else None,
    )
    if not 0 < config.top_k <= config.num_experts:
        raise ValueError(
            f"num_experts_per_tok is {config.top_k}; accepted is 1 to the number of experts, "
            f"{config.num_experts}."
        )
    return config


def sparse_layers(architecture: str, raw: dict[str, Any]) -> frozenset[int]:
    """The layers that have experts; the others have a dense MLP."""
    if architecture not in MOE_DEFAULTS:
        return frozenset()
    if "moe_layers" in raw:
        return frozenset(raw["moe_layers"])
    step = int(raw.get("decoder_sparse_step") or 1)
    dense = set(raw.get("mlp_only_layers") or ())
    return frozenset(
        layer
        for layer in range(int(raw["num_hidden_layers"]))
        if (layer + 1) % step == 0 and layer not in dense
    )


def _num_experts(raw: dict[str, Any]) -> int:
    """transformers 5 writes `num_local_experts` for every architecture."""
    return int(raw.get("num_local_experts") or required(raw, "num_experts"))
