"""Random Llama checkpoints of a few thousand parameters, for tests that need a model but not its
text."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTERMEDIATE, HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 32, 48, 16, 2, 1


def write_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 64,
    num_layers: int = 2,
    spread: float = 2.0,
    noise: float = 0.0,
    nan_token: int | None = None,
) -> Path:
    """Fills `folder` with an untied checkpoint without an end token; equal arguments give equal
    weights.

    `spread` is the standard deviation of the logits. `noise` moves every weight by so much of its
    own spread: a draft model for the one without. After `nan_token` no logit is a number."""
    generator = torch.Generator().manual_seed(vocab_size + num_layers)
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, columns) in _shapes(vocab_size, num_layers).items():
        scale = spread if name == "lm_head.weight" else 1.0
        weight, change = (
            torch.randn((2, rows, columns), generator=generator) * scale * columns**-0.5
        )
        tensors[name] = (weight + noise * change).contiguous()
    for name in (f"model.layers.{layer}.{norm}" for layer in range(num_layers) for norm in _NORMS):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN)
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    if nan_token is not None:
        tensors["model.embed_tokens.weight"][nan_token] = torch.nan
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(vocab_size, num_layers)))
    return folder


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _shapes(vocab_size: int, num_layers: int) -> dict[str, tuple[int, int]]:
    shapes = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "lm_head.weight": (vocab_size, HIDDEN),
    }
    for layer in range(num_layers):
        for name, shape in {
            "self_attn.q_proj": (NUM_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, NUM_HEADS * HEAD_DIM),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    return shapes


def _config(vocab_size: int, num_layers: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": num_layers,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": None,
        "bos_token_id": None,
        "torch_dtype": "float32",
    }
