"""What a checkpoint with FP8 weights and activations means, in plain torch on transformers'
models."""

import re
from collections.abc import Mapping
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


class CodesExperts(nn.Module):
    """Experts as transformers calls them. Tokens that all of them read are quantised with the
    largest of their static scales."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: str, bound: float | None) -> None:
        super().__init__()
        own = re.compile(re.escape(path) + r"\.(\d+)\.gate_proj\.weight$")
        self.number = sum(bool(own.match(name)) for name in tensors)
        halves = [
            tensors.get(f"{path}.{expert}.{half}.input_scale")
            for expert in range(self.number)
            for half in ("gate_proj", "up_proj")
        ]
        largest = max((each for each in halves if each is not None), default=None)
        for expert in range(self.number):
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight, scale = weight_and_scale(tensors, f"{path}.{expert}.{name}")
                static = tensors.get(f"{path}.{expert}.{name}.input_scale")
                static = static if name == "down_proj" else largest
                layer = CodesLinear(weight, scale, None, bound, static)
                self.add_module(f"{expert}_{name}", layer)

    def forward(
        self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """x `[T, H]`, experts and weights `[T, k]`."""
        total = torch.zeros_like(x)
        for expert in range(self.number):
            gate, up, down = (
                self.get_submodule(f"{expert}_{name}_proj") for name in ("gate", "up", "down")
            )
            output = down(torch.nn.functional.silu(gate(x)) * up(x))
            weight = (weights * (experts == expert)).sum(1, keepdim=True)
            total += torch.where(weight > 0, output * weight, 0)
        return total


def weight_and_scale(
    tensors: Mapping[str, torch.Tensor], module: str
) -> tuple[torch.Tensor, torch.Tensor]:
    name = f"{module}.weight"
    scale = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
    assert scale is not None
    return tensors[name], scale


def transcribed(model: Any, folder: Path, bound: float | None = None) -> Any:
    """transformers' `model` with the linear layers and experts that the checkpoint in `folder` has
    in FP8."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        path = name.removesuffix(".weight")
        layer, is_expert, _ = path.partition(".experts.")
        if tensor.dtype == torch.float8_e4m3fn and is_expert:
            if not isinstance(model.get_submodule(layer).experts, CodesExperts):
                own = CodesExperts(tensors, f"{layer}.experts", bound)
                model.get_submodule(layer).experts = own
        elif tensor.dtype == torch.float8_e4m3fn:
            parent, _, last = path.rpartition(".")
            bias = getattr(model.get_submodule(path), "bias", None)
            tensor, scale = weight_and_scale(tensors, path)
            sharing = next((names for names in SHARED_INPUTS if last in names), (last,))
            scales = [tensors.get(f"{parent}.{each}.input_scale") for each in sharing]
            static = max((each for each in scales if each is not None), default=None)
            setattr(
                model.get_submodule(parent), last, CodesLinear(tensor, scale, bias, bound, static)
            )
    return model
