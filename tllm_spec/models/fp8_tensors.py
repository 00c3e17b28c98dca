"""The tensors of a checkpoint with FP8 weights, joined with their scales."""

from collections.abc import Callable, Iterator, Set
from pathlib import Path

import torch

from tllm_spec.models.checkpoint import checkpoint_tensors, names_of_type
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.fp8_formats import Fp8Format, Granularity
from tllm_spec.models.module import Fp8Tensor, Module, Placement

FIRST_CAPABILITY = (8, 9)  # of a GPU that converts E4M3


def fp8_tensors(
    path: Path, form: Fp8Format, wants: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor | Fp8Tensor]]:
    """As `checkpoint_tensors`, without scales as tensors of their own.

    Raises:
        ValueError: a scale is missing, surplus or of a wrong shape.
    """

    def is_wanted(name: str) -> bool:
        return wants(name) and not form.leaves_out(name)

    suffix = f".weight{form.scale_suffix}"
    # A weight and its scale may be in different files; all scales together are small.
    scales = dict(checkpoint_tensors(path, lambda name: name.endswith(suffix) and is_wanted(name)))
    for name, tensor in checkpoint_tensors(
        path, lambda name: not name.endswith(suffix) and is_wanted(name)
    ):
        if tensor.dtype != torch.float8_e4m3fn:
            yield name, tensor
            continue
        scale_name = name + form.scale_suffix
        if scale_name not in scales:
            raise ValueError(f"{path} has no {scale_name} for the FP8 tensor {name}.")
        rows, columns = tensor.shape
        scale = scales.pop(scale_name)
        yield name, Fp8Tensor(tensor, form.row_scales(scale, (rows, columns), name))
    if scales:
        raise ValueError(f"{path} has scales of tensors that are not FP8: {sorted(scales)[:10]}.")


def kept_fp8(config: ModelConfig, device: torch.device) -> Granularity | None:
    """What shares a scale in weights that the checkpoint has in FP8 and that stay so; None: there
    are none, or the device gets them dequantised."""
    return config.fp8.granularity if config.fp8 is not None and multiplies_fp8(device) else None


def multiplies_fp8(device: torch.device) -> bool:
    """Whether the device has kernels that multiply E4M3 weights."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def fp8_modules(path: Path, form: Fp8Format, load_format: str) -> Callable[[str], bool]:
    """Tells whether the checkpoint has the weight of a module in FP8: by the tensors' types, or
    without tensors (`dummy`) by config.json's lists."""
    if load_format == "dummy":
        return form.keeps
    stored: Set[str] = names_of_type(path, "F8_E4M3")
    return lambda module: f"{module}.weight" in stored


def widen_others(
    model: Module, has_fp8: Callable[[str], bool], placement: Placement, prefix: str = ""
) -> None:
    """Layers of which not all weights are in FP8 get weights of the placement's dtype. `has_fp8`:
    what `fp8_modules` gives; `prefix`: of the model's paths in the checkpoint."""
    for path, module in model.named_modules():
        if not isinstance(module, Module):
            continue
        slots = list(module.slots(path))
        weights = [name for name, slot in slots if len(slot.shape) == 2]
        if any(slot.scales is not None for _, slot in slots) and not all(
            has_fp8(prefix + name.removesuffix(".weight")) for name in weights
        ):
            module.widen(placement)
