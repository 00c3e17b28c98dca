"""What Qwen3-Next adds to a `config.json`, and the same file in the keys that other architectures
have."""

from dataclasses import dataclass
from typing import Any

from tllm_spec.distributed.mapping import Mapping
from tllm_spec.kernels.gated_delta import DeltaShape
from tllm_spec.models.config_file import required, with_defaults

QWEN3_NEXT = "Qwen3NextForCausalLM"
QWEN3_NEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
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
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_nextn_predict_layers": 1,
}
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class DeltaConfig:
    """The layers with a recurrent state instead of keys and values (gated delta net)."""

    layers: tuple[int, ...]
    heads: DeltaShape
    """On all ranks together."""

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
    """With defaults, the types of all layers, and the rotated share of a head where the rotary
    embedding has it. Raises ValueError for what is not served."""
    flat = with_defaults(raw, QWEN3_NEXT_DEFAULTS)
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
    if (flat["num_nextn_predict_layers"] or 0) > 1:
        raise ValueError(
            f"num_nextn_predict_layers is {flat['num_nextn_predict_layers']}; served are 0 and 1."
        )
    fields = flat.get("rope_scaling") or flat.get("rope_parameters") or {}
    share = fields.get("partial_rotary_factor") or flat["partial_rotary_factor"] or 1.0
    rope = {"rope_type": "default", **fields, "partial_rotary_factor": share}
    more = {"rope_parameters": rope, "rope_scaling": None, "sliding_window": None}
    return flat | more | {"layer_types": None, "linear_layers": _layers_of(types, LINEAR)}


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
    return DeltaConfig(flat["linear_layers"], heads) if flat["linear_layers"] else None
