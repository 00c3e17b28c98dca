"""Adapter folders in PEFT's format, and what a merge makes of a checkpoint's weights."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def random_pairs(
    shapes: Mapping[str, tuple[int, int]], rank: int | Mapping[str, int] = 4, seed: int = 0
) -> Pairs:
    """A `[r, in]` and B `[out, r]` of modules with `[out, in]`; of another rank by last part."""
    generator, pairs = torch.Generator().manual_seed(seed), {}
    for name, (outputs, inputs) in shapes.items():
        own = rank if isinstance(rank, int) else rank[name.rpartition(".")[2]]
        a = torch.randn(own, inputs, generator=generator) * inputs**-0.5
        pairs[name] = a, torch.randn(outputs, own, generator=generator) * own**-0.5
    return pairs


def write_adapter(folder: Path, pairs: Pairs, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted({name.rpartition(".")[2] for name in pairs})
    own = CONFIG | {"target_modules": names} | config
    (folder / "adapter_config.json").write_text(json.dumps(own), encoding="utf-8")
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def linear_shapes(model: Any, *suffixes: str) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear layers of a checkpoint's tensors, or of a transformers'
    model, whose names end with one of the suffixes."""
    tensors = model if isinstance(model, dict) else dict(model.named_parameters())
    return {
        name.removesuffix(".weight"): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name.removesuffix(".weight").endswith(suffixes) and tensor.dim() == 2
    }


def merged(base: Path, folder: Path, pairs: Pairs, scale: float | Mapping[str, float]) -> Path:
    """A copy of the checkpoint with `W + scale * B A` in float32. scale: or by last part."""
    folder.mkdir(parents=True)
    tensors = load_file(base / "model.safetensors")
    for name, (a, b) in pairs.items():
        own = scale if not isinstance(scale, Mapping) else scale[name.rpartition(".")[2]]
        weight = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = (weight.float() + own * b.float().mm(a.float())).to(
            weight.dtype
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in base.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def stabilised(alpha: float, rank: int) -> float:
    return alpha / math.sqrt(rank)
