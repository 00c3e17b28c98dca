"""The architectures that are served from GGUF files, and the names of their tensors in Hugging
Face's format."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tllm_spec.models.formats.gguf_file import GgufFile

# Names before `.weight` and `.bias`; those of layers follow `blk.N.` and `model.layers.N.`.
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA3 = _HEAD_NORMS | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# llama.cpp's name of the frequencies' base in layers with a window, and those of other converters.
_LOCAL_BASES = (
    "rope.freq_base_swa",
    "rope.local.freq_base",
    "rope.local_freq_base",
    "rope.freq_base_local",
)


@dataclass(frozen=True)
class GgufArchitecture:
    """How an architecture of llama.cpp is stored."""

    architecture: str
    """Hugging Face's name."""
    layer_names: Mapping[str, str]
    pairs_rotary: bool = False
    """Whether rows of q and k are stored so that those which are rotated together are
    neighbours."""
    own_keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata that only this architecture has, and what config.json calls it."""
    norms_are_added_to_one: bool = False
    """Whether norms of Hugging Face's format are less than the stored ones by 1."""


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", _OF_LAYERS, pairs_rotary=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", _OF_LAYERS),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", _OF_LAYERS | _HEAD_NORMS),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        _OF_LAYERS | _GEMMA3,
        own_keys={
            "attention.sliding_window": "sliding_window",
            "rope.global.freq_base": "rope_theta",
            **dict.fromkeys(_LOCAL_BASES, "rope_local_base_freq"),
        },
        norms_are_added_to_one=True,
    ),
}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Raises ValueError if it is not served, or if the file is no language model."""
    kind = file.metadata.get("general.type", "model")
    name = file.metadata.get("general.architecture")
    if kind != "model" or name not in ARCHITECTURES:
        raise ValueError(
            f"{file.path} is a {kind} of the architecture {name!r}; served are models of "
            f"{', '.join(ARCHITECTURES)}."
        )
    return ARCHITECTURES[name]


def stored_name(name: str, architecture: GgufArchitecture) -> str:
    """A checkpoint's name of a tensor in Hugging Face's format. An unknown one stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{kind}"
    block, _, part = stem.partition(".")[2].partition(".")
    if not stem.startswith("blk.") or part not in architecture.layer_names:
        return name
    return f"model.layers.{block}.{architecture.layer_names[part]}.{kind}"
