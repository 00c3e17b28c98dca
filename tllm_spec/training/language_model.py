"""A language model of transformers that is trained: its making, its logits and its checkpoint."""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tllm_spec.training.trainer import Settings, add_dropout
from tllm_spec.zoo.registry import is_gguf


def build_model(shape: Path, settings: Settings, device: torch.device) -> Any:
    """A new fp32 model with the shape in `shape/config.json`."""
    config = AutoConfig.from_pretrained(shape, dtype=torch.float32)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(device)
    for layer in model.model.layers:
        add_dropout(layer, settings.dropout)
        if settings.compile:  # layer by layer: all layers share one compilation
            layer.compile(dynamic=False)
    return model


def load_language_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """A trained model of a folder or GGUF file, without gradients."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": folder}
    if is_gguf(folder):
        source = {"pretrained_model_name_or_path": folder.parent, "gguf_file": folder.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, local_files_only=True)
    return model.to(device).eval().requires_grad_(False)


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """`[B, T]` -> `[B, T, V]`, with bf16 autocast on a GPU and in fp32 on a CPU."""
    with torch.autocast("cuda", torch.bfloat16, enabled=tokens.is_cuda):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def save(model: Any, shape: Path, output: Path) -> None:
    """Write the weights in bf16 with transformers, and copy the configuration files of `shape`."""
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding; the conversion made a second tensor
    model.save_pretrained(output, state_dict=weights)
    # They replace the files just written, which have the spelling of the installed version.
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(shape / name, output / name)
