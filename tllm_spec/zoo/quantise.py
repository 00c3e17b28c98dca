"""Writes a copy of a model's folder whose projections are quantised, rounded to the nearest number,
for tests and trials:

    python -m tllm_spec.zoo.quantise zoo:llama FOLDER --format awq [--group-size 64]

| format | as it is written by | weights |
|---|---|---|
| fp8 | DeepSeek | E4M3, a scale for each 128 x 128 |
| awq | AutoAWQ | 4 bits with zero points |
| gptq, gptq_v2 | GPTQModel | 4 bits with zero points, which gptq stores less 1 |
| compressed | llm-compressor (pack-quantized) | 4 bits with zero points |
| mxfp4 | llm-compressor (mxfp4-pack-quantized) | E2M1, a power of two for each 32 |
| nvfp4 | llm-compressor (nvfp4-pack-quantized) | E2M1, an E4M3 scale for each 16 |
"""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tllm_spec.kernels.gemm.int4_weights import E2M1
from tllm_spec.models.checkpoint import INDEX, SINGLE, checkpoint_files, checkpoint_tensors
from tllm_spec.zoo.registry import resolve_model

Tensors = dict[str, torch.Tensor]
# AutoAWQ's word has the columns 0, 2, 4, 6, 1, 3, 5 and 7 from the lowest bits on.
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
FP8_BLOCK, FP8_LARGEST = 128, 448.0
NVFP4_GROUP = 16


@dataclass(frozen=True)
class Style:
    """One way to write a checkpoint. group: inputs that share a scale, 0 for whole rows."""

    packing: str
    group: int = 32
    symmetric: bool = False
    is_ordered: bool = False
    """Whether groups are spread over the inputs (`desc_act`)."""

    @property
    def quantization(self) -> dict[str, Any]:
        """The object of config.json."""
        size = self.group or -1
        if self.packing == "fp8":
            return {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
        if self.packing == "awq":
            settings = {"zero_point": not self.symmetric, "version": "gemm", "group_size": size}
            return {"quant_method": "awq", "bits": 4, **settings}
        if self.packing.startswith("gptq"):
            settings = {"bits": 4, "group_size": size, "sym": self.symmetric}
            version = {"checkpoint_format": self.packing, "desc_act": self.is_ordered}
            return {"quant_method": "gptq", **settings, **version}
        is_float = self.packing in ("mxfp4", "nvfp4")
        weights: dict[str, Any] = {"num_bits": 4, "type": "float" if is_float else "int"}
        weights |= {"symmetric": self.symmetric or is_float, "dynamic": False}
        weights["strategy"] = "group" if self.group else "channel"
        weights |= {"group_size": self.group or None, "actorder": None}
        if self.packing == "nvfp4":
            weights |= {"strategy": "tensor_group", "group_size": NVFP4_GROUP}
        if self.is_ordered:
            weights["actorder"] = "group"
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
        written = f"{self.packing}-pack-quantized" if is_float else "pack-quantized"
        common = {"quant_method": "compressed-tensors", "format": written}
        return common | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def is_projection(name: str) -> bool:
    """What quantised checkpoints quantise."""
    last = name.removesuffix(".weight").rpartition(".")[2]
    in_mixtral = last in ("w1", "w2", "w3")
    return name.endswith(".weight") and ("_proj" in last or in_mixtral) and last != "eh_proj"


def quantise(folder: Path, style: Style, wants: Callable[[str], bool] = is_projection) -> Tensors:
    """Rewrites the checkpoint with the matrices that `wants` names in this style. Returns all
    tensors, dequantised: what a checkpoint of the same values has."""
    values: Tensors = {}
    written: Tensors = {}
    for name, tensor in checkpoint_tensors(folder, lambda _: True):
        if not wants(name):
            values[name] = written[name] = tensor.clone()
            continue
        own, values[name] = _written(tensor.float(), style)
        module = name.removesuffix("weight")
        written |= {module + kind: each.contiguous() for kind, each in own.items()}
    for file in checkpoint_files(folder):
        file.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    save_file(written, folder / SINGLE, metadata={"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"] = style.quantization
    (folder / "config.json").write_text(json.dumps(raw))
    return values


def _written(weight: torch.Tensor, style: Style) -> tuple[Tensors, torch.Tensor]:
    """The tensors of a module with the weight `[N, K]`, and their values."""
    if style.packing == "fp8":
        return _in_blocks(weight)
    if style.packing == "mxfp4":
        return _in_mxfp4(weight)
    if style.packing == "nvfp4":
        return _in_nvfp4(weight)
    return _in_integers(weight, style)


def _in_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = (-(-size // FP8_BLOCK) for size in weight.shape)
    padded = weight.new_zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
    padded[: weight.shape[0], : weight.shape[1]] = weight.abs()
    tiles = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = tiles.amax((1, 3)) / FP8_LARGEST
    whole = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    whole = whole[: weight.shape[0], : weight.shape[1]]
    codes = (weight / whole).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * whole


def _in_mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A group's scale is that power of two with which its largest number is below 8; those above 6
    become 6."""
    groups = weight.reshape(len(weight), -1, 32)
    exponents = groups.abs().amax(2).log2().floor().clamp(-125, 127) - 2
    pairs, values = _in_e2m1(groups, torch.exp2(exponents))
    return {"weight_packed": pairs, "weight_scale": (exponents + 127).to(torch.uint8)}, values


def _in_nvfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """A group's largest number becomes 6 or nearly so. Scales are divided by a number with which
    the largest of them is 448."""
    groups = weight.reshape(len(weight), -1, NVFP4_GROUP)
    divisor = FP8_LARGEST * 6 / groups.abs().max()
    stored = (groups.abs().amax(2) / 6 * divisor).clamp_min(2.0**-6).to(torch.float8_e4m3fn)
    pairs, values = _in_e2m1(groups, stored.float() / divisor)
    tensors = {"weight_packed": pairs, "weight_scale": stored}
    return tensors | {"weight_global_scale": divisor.view(1)}, values


def _in_e2m1(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """groups `[N, G, inputs]` in units of scales `[N, G]`: two codes a byte, and their values
    `[N, K]`."""
    table = torch.tensor([*E2M1, *(-number for number in E2M1)])
    scales = scales.unsqueeze(2)
    codes = (groups / scales).unsqueeze(-1).sub(table).abs().argmin(-1).to(torch.uint8)
    values = (table[codes.int()] * scales).flatten(1)
    codes = codes.flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, values


def _in_integers(weight: torch.Tensor, style: Style) -> tuple[Tensors, torch.Tensor]:
    """Codes `[N, K]` of 4 bits, scales and zeros `[N, G]`, and the group of each input `[K]`. If
    the style orders inputs, each number of inputs has an order of its own."""
    num_inputs = weight.shape[1]
    groups = torch.arange(num_inputs) // (style.group or num_inputs)
    if style.is_ordered:
        groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(7))]
    number = int(groups.max()) + 1
    scales, zeros = torch.empty(len(weight), number), torch.empty(len(weight), number)
    for group in range(number):
        own = weight[:, groups == group]
        if style.symmetric:
            scales[:, group], zeros[:, group] = own.abs().amax(1) / 7, 8
            continue
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scales[:, group] = (high - low) / 15
        zeros[:, group] = (-low / scales[:, group]).round().clamp(0, 15)
    scales = scales.half()
    scale, zero = scales.float()[:, groups], zeros[:, groups]
    codes = (weight / scale + zero).round().clamp(0, 15)
    return _packed(codes.long(), scales, zeros.long(), groups, style), (codes - zero) * scale


def words(codes: torch.Tensor) -> torch.Tensor:
    """`[R, C]` of 0 to 15 as int32 `[R, ceil(C / 8)]`, the first in the lowest bits."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).reshape(len(codes), -1, 8)
    unsigned = sum(padded[..., place] << 4 * place for place in range(8))
    assert isinstance(unsigned, torch.Tensor)
    return torch.where(unsigned < 1 << 31, unsigned, unsigned - (1 << 32)).int()


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    return words(codes.reshape(len(codes), -1, 8)[..., AWQ_COLUMNS].flatten(1))


def _packed(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: torch.Tensor,
    style: Style,
) -> Tensors:
    if style.packing == "awq":
        tensors = {"qweight": awq_words(codes.t()), "scales": scales.t()}
        return tensors if style.symmetric else tensors | {"qzeros": awq_words(zeros.t())}
    if style.packing.startswith("gptq"):
        subtracted = 1 if style.packing == "gptq" else 0
        tensors = {"qweight": words(codes).t(), "scales": scales.t()}
        tensors["qzeros"] = words((zeros.t() - subtracted) % 16)
        return tensors | {"g_idx": groups.int()}
    tensors = {"weight_packed": words(codes), "weight_scale": scales}
    tensors["weight_shape"] = torch.tensor(codes.shape)
    if style.is_ordered:
        tensors["weight_g_idx"] = groups.int()
    return tensors if style.symmetric else tensors | {"weight_zero_point": words(zeros.t()).t()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    formats = "fp8", "awq", "gptq", "gptq_v2", "compressed", "mxfp4", "nvfp4"
    parser.add_argument("model", help="a folder, or a model of the zoo")
    parser.add_argument("output", type=Path, help="a folder that does not exist")
    parser.add_argument("--format", choices=formats, required=True)
    size = parser.add_argument("--group-size", type=int, choices=(0, 32, 64, 128), default=32)
    size.help = "inputs that share a scale of 4-bit weights; 0: all of a row"
    options = parser.parse_args(arguments)
    if options.format in ("mxfp4", "nvfp4") and options.group_size != 32:
        parser.error("MXFP4 has groups of 32, and NVFP4 of 16: --group-size is not for them")
    shutil.copytree(resolve_model(options.model), options.output)
    quantise(options.output, Style(options.format, options.group_size))


if __name__ == "__main__":
    main()
