"""What Qwen3-Next and Qwen3.5's text models add to a `config.json`, and the same file in the keys
that other architectures have."""

from dataclasses import dataclass
from typing import Any

from tllm_spec.distributed.communicator import Mapping
from tllm_spec.kernels.states.gated_delta import DeltaShape
from tllm_spec.models.config_file import required, with_defaults

QWEN3_NEXT = "Qwen3NextForCausalLM"
QWEN3_5, QWEN3_5_MOE = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"
_COMMON: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_EXPERTS = {
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
# The defaults of each architecture's configuration class in transformers.
DELTA_DEFAULTS: dict[str, dict[str, Any]] = {
    QWEN3_NEXT: _COMMON
    | _EXPERTS
    | {
        "vocab_size": 151936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_nextn_predict_layers": 1,
    },
    QWEN3_5: _COMMON
    | {
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "mtp_num_hidden_layers": 1,
    },
    QWEN3_5_MOE: _COMMON
    | _EXPERTS
    | {
        "vocab_size": 248320,
        "intermediate_size": 0,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "mtp_num_hidden_layers": 1,
    },
}
DELTA_WITH_EXPERTS = (QWEN3_NEXT, QWEN3_5_MOE)
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class DeltaConfig:
    """The layers with a recurrent state instead of keys and values (gated delta net)."""

    layers: tuple[int, ...]
    heads: DeltaShape
    """On all ranks together."""
    is_split: bool
    """Whether the checkpoint has a tensor each for q, k and v, for z, for b and for a; otherwise
    two, by key heads."""

    def shape(self, mapping: Mapping) -> DeltaShape:
        """One rank's share of the heads. Raises ValueError if they cannot be split evenly."""
        return DeltaShape(
            mapping.shard(self.heads.num_key_heads, "linear_num_key_heads"),
            mapping.shard(self.heads.num_value_heads, "linear_num_value_heads"),
            self.heads.key_dim,
            self.heads.value_dim,
            self.heads.kernel_size,
        )


def flat_qwen3_next(raw: dict[str, Any]) -> dict[str, Any]:
    """The configuration with defaults, the types of all layers, and the rotated share of a head
    where the rotary embedding has it. Raises ValueError for what is not served."""
    name = raw["architectures"][0]
    flat = with_defaults(raw, DELTA_DEFAULTS[name])
    number, interval = required(flat, "num_hidden_layers"), flat["full_attention_interval"]
    types = flat.get("layer_types") or [
        LINEAR if (layer + 1) % interval else FULL for layer in range(number)
    ]
    if len(types) != number:
        raise ValueError(f"layer_types has {len(types)} entries for {number} layers.")
    if unknown := set(types) - {LINEAR, FULL}:
        raise ValueError(f"layer_types has {sorted(unknown)}; served are {LINEAR!r} and {FULL!r}.")
    if FULL not in types:
        raise ValueError(f"layer_types has no {FULL!r}, which at least one layer must have.")
    key = "num_nextn_predict_layers" if name == QWEN3_NEXT else "mtp_num_hidden_layers"
    if (modules := flat[key] or 0) > 1:
        raise ValueError(f"{key} is {modules}; served are 0 and 1.")
    if flat.get("attn_output_gate") is False:
        raise ValueError("attn_output_gate is false; attention is served with a gate only.")
    fields = flat.get("rope_scaling") or flat.get("rope_parameters") or {}
    share = fields.get("partial_rotary_factor") or flat["partial_rotary_factor"] or 1.0
    head_dim = required(flat, "head_dim")
    rotated = int(head_dim * share)
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise ValueError(
            f"partial_rotary_factor is {share}; of {head_dim} elements a head, an even number must "
            "be rotated."
        )
    rope = {"rope_type": "default", **fields, "partial_rotary_factor": share}
    more = {"rope_parameters": rope, "rope_scaling": None, "sliding_window": None}
    kept = {"num_nextn_predict_layers": modules, "linear_layers": _layers_of(types, LINEAR)}
    return flat | more | kept | {"layer_types": None}


def _layers_of(types: list[str], kind: str) -> tuple[int, ...]:
    return tuple(layer for layer, each in enumerate(types) if each == kind)


def delta_config(flat: dict[str, Any]) -> DeltaConfig | None:
    """`flat` as `flat_qwen3_next` returns it. None: all layers have keys and values. Raises
    ValueError for heads that do not belong to each other."""
    heads = DeltaShape(
        flat["linear_num_key_heads"],
        flat["linear_num_value_heads"],
        flat["linear_key_head_dim"],
        flat["linear_value_head_dim"],
        flat["linear_conv_kernel_dim"],
    )
    if heads.num_value_heads % heads.num_key_heads:
        raise ValueError(
            f"linear_num_key_heads is {heads.num_key_heads}; it must divide "
            f"linear_num_value_heads, which is {heads.num_value_heads}."
        )
    if not flat["linear_layers"]:
        return None
    return DeltaConfig(flat["linear_layers"], heads, flat["architectures"][0] != QWEN3_NEXT)
