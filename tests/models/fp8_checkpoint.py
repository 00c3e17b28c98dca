"""Turns the projections of a checkpoint into FP8 with a scale for each block of 128 x 128."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

BLOCK, LARGEST = 128, 448.0
QUANTIZATION = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
Tensors = dict[str, torch.Tensor]


def is_projection(name: str) -> bool:
    """What DeepSeek V3's and Qwen3's FP8 checkpoints have in FP8."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    in_mixtral = last in ("w1", "w2", "w3")
    return name.endswith(".weight") and ("_proj" in last or in_mixtral) and last != "eh_proj"


def blocked(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 weight, its scales, and their product."""
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for i, j in torch.cartesian_prod(*(torch.arange(n) for n in scale.shape)).tolist():
        block = slice(BLOCK * i, BLOCK * (i + 1)), slice(BLOCK * j, BLOCK * (j + 1))
        scale[i, j] = weight[block].abs().max() / LARGEST
        stored[block] = (weight[block] / scale[i, j]).to(stored.dtype)
    whole = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return stored, scale, stored.float() * whole


def quantise(folder: Path, wants: Callable[[str], bool] = is_projection) -> Tensors:
    """Rewrites the checkpoint with the tensors that `wants` names in FP8. Returns all, dequantised:
    what `save_file` writes for a checkpoint of the same values without FP8."""
    tensors = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in list(tensors.items()):
        if wants(name):
            stored[name], stored[f"{name}_scale_inv"], tensors[name] = blocked(tensor.float())
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors
