"""Random Qwen3-Next checkpoints, with and without the layer that predicts a further token, and a
plain-torch transcription of that layer."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import helpers, mtp_reference

LINEAR, FULL = "linear_attention", "full_attention"
SIZES: dict[str, Any] = helpers.SIZES | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25},
}


# By family: the name of its configuration class, and keys that it does not have.
FAMILIES = {
    "Qwen3Next": ("Qwen3Next", ()),
    "Qwen3_5": ("Qwen3_5Text", ("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "Qwen3_5Moe": ("Qwen3_5MoeText", ("intermediate_size",)),
}


def save_qwen3_next(
    folder: Path, *, family: str = "Qwen3Next", dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    """Write a random model to `folder`; returns it."""
    name, absent = FAMILIES[family]
    sizes = {key: value for key, value in (SIZES | config).items() if key not in absent}
    settings = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{family}ForCausalLM")(settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_matrix = parameter.dim() > 1 and "conv1d" not in name
            parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if is_matrix else 0.3))
            if name.endswith("linear_attn.norm.weight"):
                parameter.add_(1)
    model.eval().to(dtype).save_pretrained(folder)
    return model


def save_with_images(folder: Path, family: str, **config: Any) -> Any:
    """A random model that also sees images, with experts as published; returns its text model."""
    model = save_qwen3_next(folder, family=family, **config)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor.contiguous()
        for name, tensor in model.state_dict().items()
    }
    tensors["model.visual.pos_embed.weight"] = torch.ones(8, 8)
    save_file(tensors, folder / "model.safetensors")
    names = [f"{family}ForConditionalGeneration"]
    whole = getattr(transformers, f"{family}Config")
    whole(text_config=model.config.to_dict(), architectures=names).save_pretrained(folder)
    return model


def save_with_mtp(folder: Path, noise: float = 1.0, **config: Any) -> Any:
    """With a layer that predicts a further token; returns transformers' model, which ignores it.
    `noise`: of the layer's projection, next to one that passes the embedding on."""
    model = save_qwen3_next(folder, **config)
    tensors, size = load_file(folder / "model.safetensors"), model.config.hidden_size
    number = model.config.layer_types.index(FULL)
    prefix, generator = f"model.layers.{number}.", torch.Generator().manual_seed(5)
    own = {
        name.replace(prefix, "mtp.layers.0."): tensor
        + 0.1 * torch.randn(tensor.shape, generator=generator) * tensor.std()
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        own[f"mtp.{name}.weight"] = 0.3 * noise * torch.randn(size, generator=generator)
    own["mtp.fc.weight"] = noise * torch.randn(size, 2 * size, generator=generator) * 0.1
    own["mtp.fc.weight"][:, :size] += torch.eye(size) * (1 - noise)
    save_file(tensors | own, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def save_predictable(folder: Path, **config: Any) -> None:
    """The layers add little to the embedding, so that the next-token layer, which passes the
    embedding on, is often right."""
    save_with_mtp(folder, noise=0.0, **config)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= 0.15
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class PlainMTP(mtp_reference.PlainMTP):
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")

    def __init__(self, model: Any, folder: Path) -> None:
        tensors, prefix = load_file(folder / "model.safetensors"), "mtp.layers.0."
        self.tensors = {name: x for name, x in tensors.items() if name.startswith("mtp.")}
        self.model, config = model, model.config
        self.norm_type, self.eps = type(model.model.norm), config.rms_norm_eps
        number = config.layer_types.index(FULL)
        self.layer = type(model.model.layers[number])(config, number).eval()
        own = {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
        self.load_layer(own, getattr(config, "num_experts", 0))


FINE_TUNED = {
    "mtp.fc.": "input_proj.",
    "mtp.norm.": "final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "token_layernorm.",
    "mtp.layers.0.": "",
}


def export_fine_tuned(target: Path, folder: Path) -> None:
    """The module of the target's checkpoint as speculators saves it, which has all experts in one
    tensor and copies of the target's embedding and output layer."""
    tensors, own = load_file(target / "model.safetensors"), dict[str, torch.Tensor]()
    experts: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda name: [int(part) for part in re.findall(r"\d+", name)]):
        for old, new in FINE_TUNED.items():
            if name.startswith(old):
                own["mtp_layers.0." + new + name.removeprefix(old)] = tensors[name]
    for name in [name for name in own if ".experts." in name]:
        experts.setdefault(name.rsplit(".", 2)[1], []).append(own.pop(name))
    if experts:
        gates, ups, downs = (
            torch.stack(experts[f"{kind}_proj"]) for kind in ("gate", "up", "down")
        )
        prefix = "mtp_layers.0.mlp.experts"
        own |= {f"{prefix}.gate_up_proj": torch.cat((gates, ups), 1), f"{prefix}.down_proj": downs}
    own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    own["lm_head.weight"] = tensors["lm_head.weight"].clone()
    folder.mkdir()
    save_file(own, folder / "model.safetensors")
    layer = json.loads((target / "config.json").read_text())
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": {k: v for k, v in layer.items() if k != "architectures"},
    }
    (folder / "config.json").write_text(json.dumps(config))
