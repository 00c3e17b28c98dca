"""Random EAGLE-3 heads of a few thousand parameters, in every published spelling and format.

The default sizes are those of the targets of `tests/executor/tiny_llama.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Spelling = Literal["flat", "layers", "model.flat", "model.layers"]
FLAGS = ("norm_output", "norm_before_fc", "norm_before_residual", "fc_norm", "bias")
# A head with latent attention has these, too.
LATENT: dict[str, Any] = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
SPELLINGS: tuple[Spelling, ...] = ("flat", "layers", "model.flat", "model.layers")


def write_tiny_eagle3(
    folder: Path,
    *,
    hidden_size: int = 32,
    vocab_size: int = 64,
    draft_vocab_size: int | None = 48,
    num_captured: int = 3,
    spelling: Spelling = "flat",
    seed: int = 0,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    intermediate_size: int = 48,
    num_layers: int = 1,
    model_type: Literal["llama", "qwen3"] = "llama",
    speculators: bool = False,
    latent: bool = False,
    own_modules: bool = False,
    mask_token: int | None = None,
    file: Literal["model.safetensors", "pytorch_model.bin"] = "model.safetensors",
    **config: Any,
) -> Path:
    """Fills `folder` with an untied head; equal arguments give equal weights in every spelling,
    format and file.

    `speculators`: config.json in the speculators format, otherwise flat. `latent`: with latent
    attention, as Kimi K2.5's. `config`: `FLAGS`, and further keys of its top level. Like published
    heads it has `t2d`. `own_modules`: with an embedding that is not the target's, and with an
    output layer even where `config` ties it."""
    sizes = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "draft_vocab_size": draft_vocab_size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
    }
    layer = {"model_type": model_type} | _LAYER
    if latent:
        config = LATENT | {"num_key_value_heads": num_heads} | config
    if mask_token is not None:
        config |= _PARALLEL[speculators] | {"mask_token_id": mask_token}
    flags = {flag: config.pop(flag, False) for flag in FLAGS}
    generator = torch.Generator().manual_seed(seed)
    shapes = _shapes(sizes, num_captured, flags | layer | config)
    tensors = random_tensors(shapes, generator)
    is_tied = config.get("tie_word_embeddings", False)
    for name in () if own_modules else ("embed_tokens.weight", "lm_head.weight")[: 1 + is_tied]:
        tensors.pop(name, None)
    tensors |= _vocabulary(vocab_size, draft_vocab_size, generator)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / file, {_spelt(name, spelling): tensor for name, tensor in tensors.items()})
    flat = layer | sizes | flags | _FLAT | config
    nested = _nested(layer, sizes) | flags | config
    (folder / "config.json").write_text(json.dumps(nested if speculators else flat))
    return folder


_LAYER: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16,
}
_FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


# By whether config.json is in the speculators format.
_PARALLEL: dict[bool, dict[str, Any]] = {
    False: {"architectures": ["PeagleLlamaForCausalLM"], "parallel_drafting": True},
    True: {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle"},
}


def _nested(layer: dict[str, Any], sizes: dict[str, Any]) -> dict[str, Any]:
    """The speculators format, but for the flags."""
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": sizes["draft_vocab_size"],
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "has_no_defaults_at_init": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/target"},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0.1",
        "target_hidden_size": None,
        "transformer_layer_config": layer
        | {key: size for key, size in sizes.items() if key != "draft_vocab_size"},
    }


def save(file: Path, tensors: Tensors) -> None:
    if file.suffix == ".bin":
        torch.save(tensors, file)
    else:
        save_file(tensors, file, metadata={"format": "pt"})


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save(folder / "model.safetensors", tensors)


def edit_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _shapes(
    sizes: dict[str, Any], num_captured: int, settings: dict[str, Any]
) -> dict[str, tuple[int, ...]]:
    size, inner = sizes["hidden_size"], sizes["intermediate_size"]
    target_size = settings.get("target_hidden_size") or size
    q_size, kv_size = (
        sizes[f"num_{kind}_heads"] * sizes["head_dim"] for kind in ("attention", "key_value")
    )
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (sizes["vocab_size"], size),
        "fc.weight": (size, num_captured * target_size),
        "norm.weight": (size,),
        "layers.0.hidden_norm.weight": (size,),
    }
    if sizes["draft_vocab_size"] is not None:
        shapes["lm_head.weight"] = (sizes["draft_vocab_size"], size)
    if settings["bias"]:
        shapes["fc.bias"] = (size,)
    if settings["norm_before_fc"]:
        shapes["input_norm.weight"] = (num_captured * target_size,)
    if settings["model_type"] == "qwen3":
        for layer in range(sizes["num_hidden_layers"]):
            for name in ("q_norm", "k_norm"):
                shapes[f"layers.{layer}.self_attn.{name}.weight"] = (sizes["head_dim"],)
    for index in range(num_captured if settings["fc_norm"] else 0):
        shapes[f"fc_norm.{index}.weight"] = (target_size,)
    if "mask_token_id" in settings:
        shapes["mask_hidden"] = (1, 1, num_captured * target_size)
    for layer in range(sizes["num_hidden_layers"]):
        width = size if layer else 2 * size
        own = layer_shapes(size, width, (q_size, kv_size), inner)
        if "kv_lora_rank" in settings:
            latent = _latent_shapes(settings, sizes["num_attention_heads"], width, size)
            own = {name: shape for name, shape in own.items() if "self_attn" not in name}
            own |= {f"self_attn.{name}.weight": shape for name, shape in latent.items()}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def layer_shapes(
    size: int, width: int, heads: tuple[int, int], inner: int
) -> dict[str, tuple[int, ...]]:
    """A decoder layer's tensors. width: of the input of attention; heads: all elements of q, and
    of k or v."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
        "self_attn.q_proj": (heads[0], width),
        "self_attn.k_proj": (heads[1], width),
        "self_attn.v_proj": (heads[1], width),
        "self_attn.o_proj": (size, heads[0]),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _latent_shapes(
    settings: dict[str, Any], num_heads: int, width: int, size: int
) -> dict[str, tuple[int, ...]]:
    rank, kv_rank = settings["q_lora_rank"], settings["kv_lora_rank"]
    nope, rope, value = (settings[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    queries = num_heads * (nope + rope)
    low_rank = {"q_a_proj": (rank, width), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    return {
        **(low_rank if rank else {"q_proj": (queries, width)}),
        "kv_a_proj_with_mqa": (kv_rank + rope, width),
        "kv_a_layernorm": (kv_rank,),
        "kv_b_proj": (num_heads * (nope + value), kv_rank),
        "o_proj": (size, num_heads * value),
    }


def random_tensors(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> Tensors:
    tensors: Tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        size = (2.0 if name == "lm_head.weight" else 1.0) * shape[-1] ** -0.5
        tensors[name] = 1 + 0.3 * noise if "norm" in name else noise * size
    return tensors


def _vocabulary(
    vocab_size: int, draft_vocab_size: int | None, generator: torch.Generator
) -> Tensors:
    """`d2t` holds target id - draft id of randomly chosen tokens; `t2d` marks them."""
    if draft_vocab_size is None:
        return {}
    chosen = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[chosen] = True
    return {"d2t": chosen - torch.arange(draft_vocab_size), "t2d": marks}


def _spelt(name: str, spelling: Spelling) -> str:
    if spelling.endswith("flat"):
        name = name.replace("layers.0.", "midlayer.")
        for index, level in enumerate(("low", "mid", "high")):
            name = name.replace(f"fc_norm.{index}.", f"aux_norm_{level}.")
    prefixed = spelling.startswith("model.") and not name.startswith("lm_head.")
    return f"model.{name}" if prefixed else name
