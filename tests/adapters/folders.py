"""Adapter folders in PEFT's format, and what a merge makes of a checkpoint's weights."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none"}
STACK = re.compile(r"(?<=\.experts)\.(gate_up|down)_proj\Z")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
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
    """Parameters with all experts are nested as PEFT wraps them, the first one innermost."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.rpartition(".")[2] for name in pairs if not STACK.search(name)})
    own = CONFIG | {"target_modules": targets} | config
    (folder / "adapter_config.json").write_text(json.dumps(own), encoding="utf-8")
    tensors = {}
    for name, (a, b) in pairs.items():
        module = STACK.sub("", name)
        if name.endswith(".gate_up_proj") and f"{module}.down_proj" in pairs:
            module += ".base_layer"
        tensors[f"{PREFIX}{module}.lora_A.weight"] = a.contiguous()
        tensors[f"{PREFIX}{module}.lora_B.weight"] = b.contiguous()
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


def merged(base: Path, folder: Path, pairs: Pairs, scale: float) -> Path:
    """A copy of the checkpoint with `W + scale * B A`, in float32."""
    folder.mkdir(parents=True)
    stored = load_file(base / "model.safetensors")
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in stored.items()
    }
    for name, (a, b) in pairs.items():
        for weight, delta in deltas(tensors, name, a, b):
            weight.copy_(weight + (scale * delta).view(weight.shape))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in base.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def deltas(
    tensors: dict[str, torch.Tensor], name: str, a: torch.Tensor, b: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The weights that a pair changes, and `B A`. Of a parameter with the matrices of all experts,
    as PEFT has it, or as the same experts are stored one by one."""
    if f"{name}.weight" in tensors:
        yield tensors[f"{name}.weight"], b.mm(a)
        return
    singles = [int(found[1]) for each in tensors if (found := EXPERT.search(each))]
    number = 1 + max(singles) if singles else len(tensors[name])
    by_expert = torch.einsum(
        "ore,eri->eoi", b.unflatten(1, (-1, number)), a.unflatten(0, (number, -1))
    )
    module, kind = name.rsplit(".", 1)
    for expert, delta in enumerate(by_expert):
        if (stack := tensors.get(name)) is not None:
            yield stack[expert], delta if stack.shape[1:] == delta.shape else delta.t()
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
        for part, own in zip(parts, delta.chunk(len(parts)), strict=True):
            yield tensors[f"{module}.{expert}.{part}.weight"], own
