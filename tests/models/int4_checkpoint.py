"""Turns the projections of a checkpoint into 4 bits, rounded to the nearest code, and packs them as
AutoAWQ, GPTQModel and llm-compressor do."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from safetensors.torch import load_file, save_file

from tests.models.fp8_checkpoint import Tensors, is_projection
from tllm_spec.models.formats import quantised_layers

# AutoAWQ's word has the columns 0, 2, 4, 6, 1, 3, 5 and 7 from the lowest bits on.
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Case:
    """One way to write a checkpoint. group: inputs that share a scale, 0 for whole rows."""

    packing: str
    group: int = 32
    symmetric: bool = False
    is_ordered: bool = False

    @property
    def quantization(self) -> dict[str, Any]:
        """The object of config.json."""
        size = self.group or -1
        if self.packing == "awq":
            settings = {"zero_point": not self.symmetric, "version": "gemm", "group_size": size}
            return {"quant_method": "awq", "bits": 4, **settings}
        if self.packing.startswith("gptq"):
            settings = {"bits": 4, "group_size": size, "sym": self.symmetric}
            version = {"checkpoint_format": self.packing, "desc_act": self.is_ordered}
            return {"quant_method": "gptq", **settings, **version}
        weights = {"num_bits": 4, "type": "int", "symmetric": self.symmetric, "dynamic": False}
        weights |= {"strategy": "group", "group_size": size} if self.group else CHANNEL
        weights["actorder"] = "group" if self.is_ordered else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        common = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        return common | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


CHANNEL = {"strategy": "channel", "group_size": None}


@dataclass(frozen=True)
class Rounded:
    """codes `[N, K]`, scales and zeros `[N, G]`, the group of each input `[K]`, and the product."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    values: torch.Tensor


def rounded(weight: torch.Tensor, case: Case) -> Rounded:
    """In an order of inputs of its own for each number of inputs, if the case has one."""
    num_inputs = weight.shape[1]
    groups = torch.arange(num_inputs) // (case.group or num_inputs)
    if case.is_ordered:
        groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(7))]
    number = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), number), torch.empty(len(weight), number)
    for group in range(number):
        own = weight[:, groups == group]
        if case.symmetric:
            scales[:, group], zeros[:, group] = own.abs().amax(1) / 7, 8
            continue
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scales[:, group] = (high - low) / 15
        zeros[:, group] = (-low / scales[:, group]).round().clamp(0, 15)
    scales = scales.half()
    scale, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / scale + zero).round().clamp(0, 15)
    return Rounded(codes.long(), scales, zeros.long(), groups, (codes - zero) * scale)


def words(codes: torch.Tensor) -> torch.Tensor:
    """`[R, C]` of 0 to 15 as int32 `[R, ceil(C / 8)]`, the first in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).unflatten(1, (-1, 8))
    unsigned = sum(padded[..., place] << 4 * place for place in range(8))
    assert isinstance(unsigned, torch.Tensor)
    return torch.where(unsigned < 1 << 31, unsigned, unsigned - (1 << 32)).int()


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    return words(codes.unflatten(1, (-1, 8))[..., AWQ_COLUMNS].flatten(1))


def stored(found: Rounded, case: Case) -> Tensors:
    """The tensors of a module."""
    codes, zeros, scales = found.codes, found.zeros, found.scales
    if case.packing == "awq":
        tensors = {"qweight": awq_words(codes.t()), "scales": scales.t()}
        return tensors if case.symmetric else tensors | {"qzeros": awq_words(zeros.t())}
    if case.packing.startswith("gptq"):
        subtracted = 1 if case.packing == "gptq" else 0
        tensors = {"qweight": words(codes.t().t()).t(), "scales": scales.t()}
        tensors["qzeros"] = words((zeros.t() - subtracted) % 16)
        return tensors | {"g_idx": found.groups.int()}
    tensors = {"weight_packed": words(codes), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor(codes.shape)
    if case.is_ordered:
        tensors["weight_g_idx"] = found.groups.int()
    return tensors if case.symmetric else tensors | {"weight_zero_point": words(zeros.t()).t()}


def quantise_int4(
    folder: Path, case: Case, wants: Callable[[str], bool] = is_projection
) -> Tensors:
    """Rewrites the checkpoint with the tensors that `wants` names in 4 bits. Returns all,
    dequantised."""
    tensors, written = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if not wants(name):
            written[name] = tensor
            continue
        found = rounded(tensor.float(), case)
        tensors[name] = found.values
        module = name.removesuffix("weight")
        written |= {module + kind: own.contiguous() for kind, own in stored(found, case).items()}
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = case.quantization
    (folder / "config.json").write_text(json.dumps(raw))
    return tensors


@contextmanager
def keeping_int4() -> Iterator[Mock]:
    """Also CPUs keep 4-bit weights, which the plain-torch reference multiplies. Yields what is
    asked whether a device multiplies them."""
    multiplies_int4 = quantised_layers.multiplies_int4
    asked = Mock(side_effect=lambda device: device.type == "cpu" or multiplies_int4(device))
    with patch.object(quantised_layers, "multiplies_int4", asked):
        yield asked
