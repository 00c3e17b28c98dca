"""The zoo's models with heads twice as wide and half of that zeros: the same function, for kernels
that have no heads of 32."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tllm_spec.zoo.registry import resolve_model


def write_wide(name: str, folder: Path) -> Path:
    """The checkpoint `name` with head_dim 64. Dimension j of each half of q and k goes to 2j, where
    rotation has its frequency (theta ** (-2j / 32) = theta ** (-2 (2j) / 64)); q takes on what the
    scale of the scores loses."""
    source = resolve_model(name)
    config = json.loads((source / "config.json").read_text())
    narrow, half = config["head_dim"], config["head_dim"] // 2
    place = torch.cat((torch.arange(half) * 2, torch.arange(half) * 2 + narrow))
    tensors = load_file(source / "model.safetensors")
    for key, weight in tensors.items():
        kind = key.removesuffix("_proj.weight")[-1]
        if "self_attn" not in key or not key.endswith("_proj.weight"):
            continue
        if kind == "o":
            heads = weight.view(len(weight), -1, narrow)
            wide = heads.new_zeros(*heads.shape[:2], 2 * narrow).index_copy_(2, place, heads)
            tensors[key] = wide.flatten(1)
        else:
            heads = weight.view(-1, narrow, weight.shape[1]) * (2**0.5 if kind == "q" else 1)
            wide = heads.new_zeros(len(heads), 2 * narrow, weight.shape[1]).index_copy_(
                1, place, heads
            )
            tensors[key] = wide.flatten(0, 1)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": 2 * narrow}))
    for file in source.glob("tokenizer*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder
