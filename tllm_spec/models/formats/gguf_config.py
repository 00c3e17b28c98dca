"""The keys of `config.json` that the metadata of a GGUF file stands for. Every key of the
architecture is used or refused."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tllm_spec.models.formats.gguf_architectures import architecture_of
from tllm_spec.models.formats.gguf_file import GgufFile

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
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
_HEAD_SIZES = ("attention.key_length", "attention.value_length", "rope.dimension_count")
_WITHOUT_EFFECT = ("vocab_size", "tensor_data_layout")
_ROPE = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
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
    raw = {name: own[key] for key, name in keys.items() if key in own}
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
    if surplus := own.keys() - keys.keys() - _other_keys():
        raise ValueError(
            f"{file.path}: {', '.join(prefix + key for key in sorted(surplus))} of its metadata "
            "is not served."
        )
    return raw


def _other_keys() -> set[str]:
    """That are read otherwise, or have no effect."""
    scaling = {f"rope.scaling.{key}" for key in ("type", "finetuned", *_ROPE)}
    return {*_HEAD_SIZES, *_WITHOUT_EFFECT, *scaling}


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


def _rope(file: GgufFile, own: Mapping[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling`."""
    kind = own.get("rope.scaling.type", "none")
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
