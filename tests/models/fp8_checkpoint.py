"""Turns the projections of a checkpoint into FP8, with a scale for each tensor, each row or each
block of 128 x 128, in the formats of different producers. `tensor` and `block` leave activations
alone, the others ask for FP8."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from safetensors.torch import load_file, save_file

from tllm_spec.models.formats import quantised_layers

BLOCK, LARGEST = 128, 448.0
# By what shares a scale: the shape of such a tile of weights, None for all of a dimension.
TILES = {
    "tensor": (None, None),
    "row": (1, None),
    "bounded": (1, None),
    "block": (BLOCK, BLOCK),
    "deepseek": (BLOCK, BLOCK),
    "autofp8": (None, None),
    "autofp8 static": (None, None),
    "modelopt": (None, None),
    "compressed": (1, None),
}
_EIGHT_BITS = {"type": "float", "num_bits": 8, "symmetric": True, "dynamic": False}


def compressed(strategy: str, activations: dict[str, Any] | None) -> dict[str, Any]:
    """A quantization_config of llm-compressor."""
    weights = _EIGHT_BITS | {"strategy": strategy}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


QUANTIZATION: dict[str, dict[str, Any]] = {
    "tensor": compressed("tensor", None),
    "row": {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    "bounded": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    "block": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"},
    "deepseek": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]},
    "autofp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "autofp8 static": {"quant_method": "fp8", "activation_scheme": "static"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "compressed": compressed("channel", _EIGHT_BITS | {"strategy": "tensor"}),
}
STATIC = ("autofp8 static", "modelopt", "compressed")
INPUT_SCALES = (0.011, 0.02, 0.014)  # of activations up to 5 and more
Tensors = dict[str, torch.Tensor]


def is_projection(name: str) -> bool:
    """What DeepSeek V3's and Qwen3's FP8 checkpoints have in FP8."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    in_mixtral = last in ("w1", "w2", "w3")
    return name.endswith(".weight") and ("_proj" in last or in_mixtral) and last != "eh_proj"


def tiled(
    weight: torch.Tensor, granularity: str = "block"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 weight, its scales as a checkpoint has them, and their product."""
    rows, columns = (
        wanted or size for wanted, size in zip(TILES[granularity], weight.shape, strict=True)
    )
    short = -weight.shape[1] % columns, -weight.shape[0] % rows
    padded = torch.nn.functional.pad(weight, (0, short[0], 0, short[1])).abs()
    tiles = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = tiles.amax((1, 3)) / LARGEST
    whole = scale.repeat_interleave(rows, 0)[: weight.shape[0]]
    whole = whole.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    stored = (weight / whole).to(torch.float8_e4m3fn)
    of_tensor = TILES[granularity] == (None, None)
    return stored, scale.view(()) if of_tensor else scale, stored.float() * whole


def quantise(
    folder: Path, wants: Callable[[str], bool] = is_projection, granularity: str = "block"
) -> Tensors:
    """Rewrites the checkpoint with the tensors that `wants` names in FP8. Returns all, dequantised:
    what `save_file` writes for a checkpoint of the same values without FP8."""
    tensors = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    suffix = "_scale_inv" if granularity in ("block", "deepseek") else "_scale"
    for index, (name, tensor) in enumerate(list(tensors.items())):
        if wants(name):
            stored[name], stored[name + suffix], tensors[name] = tiled(tensor.float(), granularity)
            if granularity in STATIC:
                scale = torch.tensor(INPUT_SCALES[(index + index // 3) % len(INPUT_SCALES)])
                stored[f"{name.removesuffix('.weight')}.input_scale"] = scale
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = QUANTIZATION[granularity]
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


@contextmanager
def _keeping(multiplies: str) -> Iterator[Mock]:
    """Also CPUs keep quantised weights, which the plain-torch references multiply. Yields what is
    asked whether a device multiplies them."""
    original = getattr(quantised_layers, multiplies)
    asked = Mock(side_effect=lambda device: device.type == "cpu" or original(device))
    with patch.object(quantised_layers, multiplies, asked):
        yield asked


keeping_fp8 = partial(_keeping, "multiplies_fp8")
keeping_int4 = partial(_keeping, "multiplies_four_bit")
