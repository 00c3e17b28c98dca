"""Random EAGLE-1/2 heads of a few thousand parameters, in every published spelling and file.

The default sizes are those of the targets of `tests/executor/tiny_llama.py`.
"""

import json
from pathlib import Path
from typing import Any, Literal

import torch

from tests.models.tiny_eagle3 import layer_shapes, random_tensors, save

OWN = ("embed_tokens", "lm_head")


def write_tiny_eagle(
    folder: Path,
    *,
    hidden_size: int = 32,
    vocab_size: int = 64,
    num_layers: int = 1,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    intermediate_size: int = 48,
    bias: bool = False,
    qkv_bias: bool = False,
    input_norm: bool = False,
    own_modules: bool = False,
    prefix: Literal["", "model."] = "",
    seed: int = 0,
    file: Literal["model.safetensors", "pytorch_model.bin"] = "model.safetensors",
    **config: Any,
) -> Path:
    """Fills `folder`; equal arguments give equal weights in every spelling and file.

    `config`: further keys of config.json, which says nothing of `bias` and `input_norm`.
    `own_modules`: with an embedding and an output layer that are not the target's."""
    generator = torch.Generator().manual_seed(seed)
    heads = (num_heads * head_dim, num_kv_heads * head_dim, intermediate_size)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden_size, 2 * hidden_size)}
    if bias:
        shapes["fc.bias"] = (hidden_size,)
    for number in range(num_layers):
        names = _layer(hidden_size, *heads, bias=qkv_bias, norm=input_norm or number > 0)
        shapes |= {f"layers.{number}.{name}": shape for name, shape in names.items()}
    if own_modules:
        shapes |= {f"{name}.weight": (vocab_size, hidden_size) for name in OWN}
    tensors = random_tensors(shapes, generator)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / file, {prefix + name: tensor for name, tensor in tensors.items()})
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 16,
        "torch_dtype": "float32",
    }
    if qkv_bias and "architectures" not in config:
        keys["qkv_bias"] = True
    (folder / "config.json").write_text(json.dumps(keys | config))
    return folder


def _layer(
    size: int, q_size: int, kv_size: int, inner: int, *, bias: bool, norm: bool
) -> dict[str, tuple[int, ...]]:
    shapes = dict(layer_shapes(size, size, (q_size, kv_size), inner))
    del shapes["input_layernorm.weight"]
    if norm:
        shapes["input_layernorm.weight"] = (size,)
    if bias:
        for kind, rows in zip("qkv", (q_size, kv_size, kv_size), strict=True):
            shapes[f"self_attn.{kind}_proj.bias"] = (rows,)
    return shapes
