"""What a checkpoint with FP8 weights and activations means, in plain torch on transformers'
models."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

LARGEST, BLOCK = 448.0, 128
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class CodesLinear(nn.Module):
    """`y = s_x * s_w * (codes of x) W^T`. weight: `[N, K]` in FP8; scale: `[N, 1]`, `[]` or of
    blocks; input_scale: static; None: of each token, with blocks of each 128 inputs of it."""

    def __init__(
        self,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: Any,
        bound: float | None,
        input_scale: torch.Tensor | None,
    ) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.width = BLOCK if scale.ndim == 2 and scale.shape[0] < rows else columns
        scales = scale.double().reshape(-1, scale.shape[1] if self.width == BLOCK else 1)
        if self.width == BLOCK:
            scales = scales.repeat_interleave(BLOCK, 0)[:rows]
            scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
        self.weight = weight.double() * scales
        self.bias, self.bound, self.input_scale = bias, bound or float("inf"), input_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.float()
        if self.input_scale is None:
            parts = [each.abs().amax(-1, keepdim=True) for each in values.split(self.width, -1)]
            largest = [part.clamp_max(self.bound) / LARGEST for part in parts]
            own = torch.cat(largest, -1).repeat_interleave(self.width, -1)[..., : x.shape[-1]]
        else:
            own = self.input_scale.float().expand_as(values)
        codes = (values / own).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
        y = (codes.double() * own.double()) @ self.weight.t()
        return (y if self.bias is None else y + self.bias.double()).to(x.dtype)


def transcribed(model: Any, folder: Path, bound: float | None = None) -> Any:
    """transformers' `model` with the linear layers that the checkpoint in `folder` has in FP8."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            path = name.removesuffix(".weight")
            parent, _, last = path.rpartition(".")
            bias = getattr(model.get_submodule(path), "bias", None)
            scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
            assert scale is not None
            sharing = next((names for names in SHARED_INPUTS if last in names), (last,))
            scales = [tensors.get(f"{parent}.{each}.input_scale") for each in sharing]
            static = max((each for each in scales if each is not None), default=None)
            setattr(
                model.get_submodule(parent), last, CodesLinear(tensor, scale, bias, bound, static)
            )
    return model
