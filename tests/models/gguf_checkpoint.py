"""Writes models as GGUF files with the package gguf, as llama.cpp's converters do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

# The package does not quantise to the K types. In a block: bytes before, and of, 16-bit scales.
SCALES = {Type.Q4_K: (0, 4), Type.Q5_K: (0, 4), Type.Q6_K: (208, 2)}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Gemma 3's names of norms that are others, or other ones.
GEMMA3 = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Settle = Callable[[gguf.GGUFWriter], None]


def nothing(writer: gguf.GGUFWriter) -> None:
    """Adds nothing."""


def save_gguf(
    path: Path,
    architecture: str,
    config: Any,
    tensors: Mapping[str, torch.Tensor],
    types: Mapping[str, Type] | None = None,
    settle: Settle = nothing,
) -> Path:
    """types: of matrices, by ends of their names here; others are F32, as vectors always are.
    settle: may add metadata and tensors."""
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    settle(writer)
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = in_pairs(values, head_dim)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        chosen = (kind for end, kind in (types or {}).items() if name.endswith(end))
        kind = next(chosen, Type.F32) if values.ndim > 1 else Type.F32
        stored = random_blocks(values.shape, kind) if kind in SCALES else None
        if stored is None:
            stored = gguf.quantize(values, kind)
        writer.add_tensor(stored_name(name, architecture), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_name(name: str, architecture: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    names = NAMES | GEMMA3 if architecture == "gemma3" else NAMES
    return f"blk.{layer}.{names[part]}.{kind}"


def in_pairs(values: np.ndarray[Any, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Rows `[H * D, K]` of which those that are rotated together become neighbours."""
    halves = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def random_blocks(shape: tuple[int, ...], kind: Type) -> np.ndarray[Any, Any]:
    """`[N, bytes]`, with scales that give weights of about 0.1."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(shape[0])
    blocks = generator.integers(0, 256, (shape[0], shape[1] // elements, size), np.uint8)
    start, length = SCALES[kind]
    scales = np.array([3e-4, 2e-3][: length // 2], np.float16)
    blocks[..., start : start + length] = scales.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    """A byte-level vocabulary from a folder's tokenizer.json, with its end token and template."""
    found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {each["content"]: each["id"] for each in found["added_tokens"]}
    ids = found["model"]["vocab"] | special
    tokens = sorted(ids, key=ids.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = found["model"]["merges"]
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(ids[settings["bos_token"]])
    writer.add_eos_token_id(ids[settings["eos_token"]])
    writer.add_chat_template(settings["chat_template"])
