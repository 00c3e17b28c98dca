"""What a checkpoint with FP8 weights and one dynamic activation scale a token means, in plain torch
on transformers' models."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

LARGEST = 448.0


class CodesLinear(nn.Module):
    """`y = s_x * s_w * (codes of x) W^T`. weight: `[N, K]` in FP8; scale: `[N, 1]` or `[]`."""

    def __init__(
        self, weight: torch.Tensor, scale: torch.Tensor, bias: Any, bound: float | None
    ) -> None:
        super().__init__()
        self.weight, self.scale = weight.double(), scale.double().reshape(-1)
        self.bias, self.bound = bias, bound or float("inf")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = x.float().abs().amax(-1, keepdim=True).clamp_max(self.bound)
        own = largest / LARGEST
        codes = (x.float() / own).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        y = codes.double() @ self.weight.t() * self.scale * own.double()
        return (y if self.bias is None else y + self.bias.double()).to(x.dtype)


def transcribed(model: Any, folder: Path, bound: float | None = None) -> Any:
    """transformers' `model` with the linear layers that the checkpoint in `folder` has in FP8."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            path = name.removesuffix(".weight")
            parent, _, last = path.rpartition(".")
            bias = getattr(model.get_submodule(path), "bias", None)
            layer = CodesLinear(tensor, tensors[f"{name}_scale"], bias, bound)
            setattr(model.get_submodule(parent), last, layer)
    return model
