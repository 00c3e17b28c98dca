"""Random checkpoints of Gemma 4, as transformers writes them."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

SLIDING, FULL = "sliding_attention", "full_attention"
ROPES: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "layer_types": [SLIDING, FULL],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 128,
    "sliding_window": 4,
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": ROPES,
    "final_logit_softcapping": 30.0,
}
# The kinds of published models: 31B, E2B and E4B, and 26B-A4B.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "per layer": {
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, FULL] * 2,
        "hidden_size_per_layer_input": 6,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
    },
    "experts": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 12,
    },
}
ONES = ("norm.weight", "norm_1.weight", "norm_2.weight", "_scalar", "router.scale", "expert_scale")


def fill(model: Any, seed: int = 1234) -> None:
    """Tensors by name: 0.2 times a normal number, and 1 more for factors."""
    generator, tensors = torch.Generator().manual_seed(seed), model.state_dict()
    with torch.no_grad():
        for name in sorted(tensors):
            if not tensors[name].is_floating_point():
                continue
            noise = 0.2 * torch.randn(tensors[name].shape, generator=generator)
            is_factor = name.endswith(ONES) or "layernorm" in name
            tensors[name].copy_(noise + 1 if is_factor else noise)


def save_gemma4(folder: Path, kind: str = "dense", *, seed: int = 1234, **config: Any) -> Any:
    """Write a random text model to `folder`; returns it."""
    settings = transformers.Gemma4TextConfig(**(SIZES | KINDS[kind] | config))
    settings._attn_implementation = "eager"
    model = transformers.Gemma4ForCausalLM(settings).float().eval()
    fill(model, seed)
    model.save_pretrained(folder)
    return model


# As the models of helpers.py.
LARGER: dict[str, Any] = {
    "vocab_size": 128,
    "vocab_size_per_layer_input": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
}
LARGER_KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "per layer": {
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    },
    "experts": {},
}


def save_larger(folder: Path, kind: str = "dense", **config: Any) -> Any:
    return save_gemma4(folder, kind, **(LARGER | LARGER_KINDS[kind] | config))


# Of published models that also see and hear: what their other tensors begin with.
TOWERS = {
    "Gemma4ForConditionalGeneration": ("vision_tower", "audio_tower", "embed_vision"),
    "Gemma4UnifiedForConditionalGeneration": ("vision_embedder", "embed_vision", "embed_audio"),
}


def save_with_towers(folder: Path, architecture: str, kind: str) -> Any:
    """Write a random model that also sees and hears to `folder`; returns its text model. Layers
    without keys of their own have some in the file, as in published ones."""
    model = save_larger(folder, kind)
    stored = load_file(folder / "model.safetensors")
    tensors = {f"model.language_model.{name[6:]}": stored[name] for name in stored}
    tensors |= {f"model.{tower}.0.weight": torch.ones(8) for tower in TOWERS[architecture]}
    if kind == "per layer":
        for name in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.language_model.layers.4.self_attn.{name}.weight"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    text = model.config.to_dict()
    heads = text.pop("per_layer_config")["1"]  # files before transformers 5.24 have these keys
    text["global_head_dim"] = heads["head_dim"]
    text["num_global_key_value_heads"] = heads.get("num_key_value_heads")
    whole = {"architectures": [architecture], "text_config": text, "tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(whole))
    return model


def save_assistant(
    folder: Path, target: Any, *, ordered: bool = False, seed: int = 1234, **text: Any
) -> Any:
    """Write a random assistant for a text model of transformers to `folder`; returns it."""
    own = target.config
    sizes = {"vocab_size": own.vocab_size, "hidden_size": 12, "vocab_size_per_layer_input": 0}
    sizes |= {"head_dim": own.per_layer_config[0].head_dim, "final_logit_softcapping": None}
    sizes |= {"num_kv_shared_layers": 2, "sliding_window": own.sliding_window}
    full = own.per_layer_config[1]
    sizes |= {"global_head_dim": full.head_dim, "attention_k_eq_v": own.attention_k_eq_v}
    sizes |= {"num_global_key_value_heads": full.num_key_value_heads}
    settings = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**(SIZES | sizes | text)),
        backbone_hidden_size=own.hidden_size,
        use_ordered_embeddings=ordered,
        num_centroids=8,
        centroid_intermediate_top_k=2,
    )
    settings._attn_implementation = "eager"
    model = transformers.Gemma4AssistantForCausalLM(settings).float().eval()
    fill(model, seed)
    if ordered:
        number = own.vocab_size
        order = [(7 * place + 3) % number for place in range(number)]
        model.masked_embedding.token_ordering.copy_(torch.tensor(order))
    model.save_pretrained(folder)
    return model
