"""The keys of `config.json` that the metadata of a GGUF file stands for. A key of the architecture
that is not known is refused if it would change what the model computes; a warning names others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tllm_spec.models.formats.gguf_file import GgufFile

# The architectures that are served from GGUF files, and the names of their tensors in Hugging
# Face's format.


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


EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
PATTERN = "attention.sliding_window_pattern"
GEMMA3_27B_LAYERS = 62
# Metadata after the architecture's name, and what config.json calls it.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {"attention.head_count_kv": "num_key_value_heads", "rope.freq_base": "rope_theta"}
_SIZES_OF_HEADS = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_HEAD_SIZES = (*_SIZES_OF_HEADS, *(f"{key}_swa" for key in _SIZES_OF_HEADS))
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout", "rope.dimension_sections")
_ROPE = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_attn_factor": "attention_factor",
}
# Keys that change what a model computes without a tensor that shows it, with the values that mean
# that it does not.
_MATTERS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        """
        attention.sliding_window attention.sliding_window_pattern rope.freq_base_swa
        attention.scale attention.clamp_kqv attention.max_alibi_bias attention.shared_kv_layers
        attention.temperature_length attention.temperature_scale attn_logit_softcapping
        final_logit_softcapping router_logit_softcapping swiglu_clamp_exp
        activation_sparsity_scale use_parallel_residual expert_count full_attention_interval
        rope.scaling.alpha rope.scaling.yarn_log_multiplier
        """.split(),  # noqa: SIM905 (a list of one key a line would fill the file)
        (0,),
    ),
    **dict.fromkeys(
        """
        logit_scale residual_scale embedding_scale attention.output_scale rope.scale_linear
        rope.freq_scale rope.scaling.attn_factor
        """.split(),  # noqa: SIM905 (a list of one key a line would fill the file)
        (0, 1),
    ),
    "attention.causal": (True,),
    "rope.scaling.yarn_ext_factor": (1, -1),
}
_END_TOKENS = ("eos", "eot", "eom")
# Llama 3.1's scaling, of which files have the resulting factors: its lengths of context are fixed.
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata as the keys of `config.json`. Raises ValueError for an architecture, a
    key or a tensor of frequencies that is not served, and for a size that is missing."""
    architecture = architecture_of(file)
    prefix = file.metadata["general.architecture"] + "."
    own = {
        key.removeprefix(prefix): value
        for key, value in file.metadata.items()
        if key.startswith(prefix)
    }
    if absent := [prefix + key for key in _SIZES if key not in own]:
        raise ValueError(f"{file.path} has no {', '.join(absent)} in its metadata.")
    if EMBEDDING not in file.tensors:
        raise ValueError(f"{file.path} has no tensor {EMBEDDING}.")
    keys = {**_SIZES, **_OPTIONAL, **architecture.own_keys}
    raw: dict[str, Any] = {}
    for key, name in keys.items():
        if key in own and raw.setdefault(name, own[key]) != own[key]:
            raise ValueError(
                f"{file.path}: {prefix + key} is {own[key]}, and another key says {raw[name]}."
            )
    raw["architectures"] = [architecture.architecture]
    raw["dtype"] = "bfloat16"
    raw["vocab_size"] = file.tensors[EMBEDDING].shape[0]
    raw["tie_word_embeddings"] = OUTPUT not in file.tensors
    ends = (file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _END_TOKENS)
    raw["eos_token_id"] = [token for token in ends if token is not None]
    raw |= _head_size(file, own)
    raw["rope_scaling"] = _rope(file, own, raw)
    if prefix == "gemma3.":
        raw["query_pre_attn_scalar"] = _gemma3_scalar(raw)
        raw |= _gemma3_layers(file, own, raw)
    wrong = [
        prefix + key
        for key in unknown_keys(file)
        if key in _MATTERS and own[key] not in _MATTERS[key]
    ]
    if wrong:
        raise ValueError(f"{file.path}: {', '.join(wrong)} of its metadata is not served.")
    return raw


def unknown_keys(file: GgufFile) -> list[str]:
    """Keys of the architecture's metadata, without its name, that are neither used nor known to
    have no effect."""
    prefix = file.metadata["general.architecture"] + "."
    own = {key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)}
    pattern = {PATTERN} if prefix == "gemma3." else set()
    scaling = {f"rope.scaling.{key}" for key in ("type", "finetuned", *_ROPE)}
    used = {*_SIZES, *_OPTIONAL, *architecture_of(file).own_keys, *pattern, *scaling}
    return sorted(own - used - {*_HEAD_SIZES, *_WITHOUT_EFFECT})


def _head_size(file: GgufFile, own: Mapping[str, Any]) -> dict[str, Any]:
    """The key `head_dim` if the file has it. Queries, keys, values and the rotated part must have
    one size."""
    found = {key: own[key] for key in _HEAD_SIZES if key in own}
    if len(set(found.values())) > 1:
        sizes = ", ".join(f"{key} is {value}" for key, value in found.items())
        raise ValueError(f"{file.path}: {sizes}; served are heads whose sizes are equal.")
    return {"head_dim": next(iter(found.values()))} if found else {}


def _gemma3_scalar(raw: Mapping[str, Any]) -> int:
    """The size of a head, except of the model of 27 billion, which no key of its own says."""
    by_heads = raw["hidden_size"] // raw["num_attention_heads"]
    size: int = raw.get("head_dim", by_heads)
    return by_heads if raw["num_hidden_layers"] == GEMMA3_27B_LAYERS else size


def _gemma3_layers(
    file: GgufFile, own: Mapping[str, Any], raw: Mapping[str, Any]
) -> dict[str, Any]:
    """The key `layer_types`, if the file says which layers have a window: those that are true in a
    list, or, by a number n, all but every n-th."""
    pattern, number = own.get(PATTERN), raw["num_hidden_layers"]
    if type(pattern) is int and pattern > 0:
        pattern = [layer % pattern > 0 for layer in range(1, number + 1)]
    elif pattern is None:
        return {}
    elif not isinstance(pattern, tuple) or len(pattern) != number:
        raise ValueError(
            f"{file.path}: {PATTERN} is {pattern}; it must be a number above 0, or a list for "
            f"{number} layers."
        )
    return {"layer_types": [f"{'sliding' if each else 'full'}_attention" for each in pattern]}


def _rope(file: GgufFile, own: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`. A factor without a type is linear."""
    is_scaled = own.get("rope.scaling.factor", 0) not in (0, 1)
    kind = own.get("rope.scaling.type", "linear" if is_scaled else "none")
    if ROPE_FACTORS in file.tensors:
        return _llama3(file, raw)
    if kind == "none":
        return {"rope_type": "default"}
    return {"rope_type": kind} | {
        name: own[f"rope.scaling.{key}"]
        for key, name in _ROPE.items()
        if f"rope.scaling.{key}" in own
    }


def _llama3(file: GgufFile, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What wavelengths are multiplied by, `[D / 2]`, must be what Llama 3.1 does."""
    found = file.rows(file.tensors[ROPE_FACTORS]).view(np.float32).ravel()
    factor = float(found.max())
    exponents = np.arange(len(found)) / len(found)
    original = _LLAMA3["original_max_position_embeddings"]
    rotations = original / (2 * math.pi * raw.get("rope_theta", 10000.0) ** exponents)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    expected = 1 / ((1 - kept) / factor + kept)
    if not np.allclose(found, expected, rtol=1e-3):
        raise ValueError(
            f"{file.path}: the factors of {ROPE_FACTORS} are not those of Llama 3.1; others are "
            "not served."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
