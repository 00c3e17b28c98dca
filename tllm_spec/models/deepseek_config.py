"""What DeepSeek's `config.json` has in addition to other decoders: latent attention, its way of
routing, and layers that predict further tokens."""

import math
from dataclasses import dataclass
from typing import Any

from tllm_spec.attention.geometry import LatentGeometry
from tllm_spec.config.option_checks import shown
from tllm_spec.distributed.communicator import Mapping
from tllm_spec.models.config_file import required, with_defaults
from tllm_spec.models.moe_config import MoEConfig

# The defaults of each architecture's configuration class in transformers.
_COMMON = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
}
DEEPSEEK_V32 = "DeepseekV32ForCausalLM"
DEEPSEEK_DEFAULTS: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": _COMMON
    | {
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "topk_method": "greedy",
    },
    "DeepseekV3ForCausalLM": _V3,
    DEEPSEEK_V32: _V3 | {"max_position_embeddings": 163840, "index_topk": 2048},
}


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (arXiv 2405.04434, section 2.1)."""

    q_lora_rank: int | None
    """None: queries are projected from the hidden state in one step."""
    kv_lora_rank: int
    nope_dim: int
    """Elements of a head's query and key without position."""
    rope_dim: int
    value_dim: int
    is_interleaved: bool
    """Whether the checkpoint's rotated elements are pairs of neighbours instead of two halves."""
    scale: float
    """The factor of the scores. With YaRN it includes the square of `mscale_all_dim`'s factor."""
    index_topk: int | None = None
    """DeepSeek V3.2: of more keys than these an indexer chooses so many, which is not served. None:
    there is no indexer."""
    norm_eps: float = 1e-6
    """The epsilon of both norms of the low-rank projections, whatever the model's other norms
    have."""

    def geometry(self, num_layers: int, num_heads: int, mapping: Mapping) -> LatentGeometry:
        return LatentGeometry(
            num_layers=num_layers,
            num_heads=mapping.shard(num_heads, "num_attention_heads"),
            latent_dim=self.kv_lora_rank,
            rope_dim=self.rope_dim,
            nope_dim=self.nope_dim,
            value_dim=self.value_dim,
            scale=self.scale,
        )


def flat_deepseek_v32(raw: dict[str, Any]) -> dict[str, Any]:
    """Without the types of layers, which transformers writes. Raises ValueError for types of MLPs
    that do not follow from `first_k_dense_replace`."""
    flat = with_defaults(raw, DEEPSEEK_DEFAULTS[DEEPSEEK_V32])
    dense, number = flat["first_k_dense_replace"], required(flat, "num_hidden_layers")
    expected = ["dense" if layer < dense else "sparse" for layer in range(number)]
    if flat.get("mlp_layer_types") not in (None, expected):
        raise ValueError(
            f"mlp_layer_types is {shown(flat['mlp_layer_types'])}; served is 'dense' for the first "
            f"first_k_dense_replace = {dense} layers and 'sparse' for the others."
        )
    if set(flat.get("layer_types") or ()) - {"indexed_attention"}:
        raise ValueError(
            f"layer_types is {shown(flat['layer_types'])}; served is 'indexed_attention'."
        )
    return flat | {"layer_types": None}


def mla_config(architecture: str, raw: dict[str, Any]) -> MLAConfig | None:
    """None for other architectures. `raw` has the defaults filled in.

    Raises:
        ValueError: attention_bias is set.
    """
    if architecture not in DEEPSEEK_DEFAULTS:
        return None
    if raw.get("attention_bias"):
        raise ValueError("attention_bias is true; DeepSeek models are served without biases.")
    rank, nope, rope = raw["q_lora_rank"], raw["qk_nope_head_dim"], raw["qk_rope_head_dim"]
    return MLAConfig(
        q_lora_rank=None if rank is None else int(rank),
        kv_lora_rank=int(raw["kv_lora_rank"]),
        nope_dim=int(nope),
        rope_dim=int(rope),
        value_dim=int(raw["v_head_dim"]),
        is_interleaved=bool(raw.get("rope_interleave", True)),
        scale=(nope + rope) ** -0.5 * _yarn_scale(raw),
        index_topk=int(raw["index_topk"]) if architecture == DEEPSEEK_V32 else None,
    )


def _yarn_scale(raw: dict[str, Any]) -> float:
    fields = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind, weight = fields.get("rope_type") or fields.get("type"), fields.get("mscale_all_dim")
    factor = fields.get("factor") or 1.0
    if kind in (None, "default") or not weight or factor <= 1:
        return 1.0
    return float((0.1 * weight * math.log(factor) + 1.0) ** 2)


def deepseek_moe(raw: dict[str, Any]) -> MoEConfig | None:
    """Raises ValueError for a way of routing that is not served."""
    if not raw["n_routed_experts"]:
        return None
    method, top_k = raw["topk_method"], int(raw.get("num_experts_per_tok") or 0)
    scoring: Any = raw.get("scoring_func")
    if scoring is None:
        scoring = "sigmoid" if method == "noaux_tc" else "softmax"
    if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        raise ValueError(
            f"topk_method is {method!r}; served are 'greedy', 'group_limited_greedy' and "
            "'noaux_tc'."
        )
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring_func is {scoring!r}; served are 'softmax' and 'sigmoid'.")
    if method != "noaux_tc" and raw.get("norm_topk_prob"):
        raise ValueError(
            f"norm_topk_prob is true with topk_method {method!r}; served is false, or 'noaux_tc'."
        )
    if not 0 < top_k <= raw["n_routed_experts"]:
        raise ValueError(
            f"num_experts_per_tok is {top_k}; accepted is 1 to n_routed_experts, which is "
            f"{raw['n_routed_experts']}."
        )
    size = int(raw["moe_intermediate_size"])
    has_groups = method != "greedy"
    num_groups = int(raw.get("n_group") or 1) if has_groups else 1
    top_groups = int(raw.get("topk_group") or 1) if has_groups else 1
    if raw["n_routed_experts"] % num_groups or top_groups > num_groups:
        raise ValueError(
            f"n_group is {num_groups} and topk_group is {top_groups}; the former must divide "
            f"n_routed_experts, which is {raw['n_routed_experts']}, and be no less than the latter."
        )
    return MoEConfig(
        hidden_size=int(raw["hidden_size"]),
        num_experts=int(raw["n_routed_experts"]),
        top_k=top_k,
        intermediate_size=size,
        scoring=scoring,
        normalise_top_k=bool(raw.get("norm_topk_prob")),
        routed_scaling_factor=float(raw["routed_scaling_factor"]),
        num_groups=num_groups,
        top_groups=top_groups,
        has_correction_bias=method == "noaux_tc",
        float32_router=True,
        shared_intermediate_size=size * int(raw.get("n_shared_experts") or 0),
    )


def deepseek_sparse_layers(raw: dict[str, Any]) -> frozenset[int]:
    """The decoder's layers with experts."""
    step = int(raw.get("moe_layer_freq") or 1)
    layers = range(int(raw["first_k_dense_replace"]), int(raw["num_hidden_layers"]))
    return frozenset(layer for layer in layers if layer % step == 0)


def num_nextn_layers(raw: dict[str, Any]) -> int:
    """Layers after the decoder's in the checkpoint, each of which predicts one token further (MTP).
    A key that is absent means none, as in published checkpoints."""
    return int(raw.get("num_nextn_predict_layers") or 0)
