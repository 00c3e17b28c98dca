"""The tensors of a checkpoint with FP8 weights, joined with their scales."""

from collections.abc import Callable, Container, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tllm_spec.models.checkpoint import checkpoint_files, checkpoint_tensors
from tllm_spec.models.config import ModelConfig
from tllm_spec.models.fp8_formats import Fp8Format
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


def fp8_names(path: Path) -> frozenset[str]:
    """The tensors in FP8. Reads the files' headers only. Raises ValueError as
    `checkpoint_tensors`."""
    names: set[str] = set()
    for file in checkpoint_files(path):
        try:
            with safe_open(file, framework="pt") as checkpoint:
                names.update(
                    name
                    for name in checkpoint.keys()  # noqa: SIM118 (not a dict: it has no iterator)
                    if checkpoint.get_slice(name).get_dtype() == "F8_E4M3"
                )
        except SafetensorError as error:
            raise ValueError(f"{file} is not a readable safetensors file: {error}.") from error
    return frozenset(names)


def keeps_fp8(config: ModelConfig, device: torch.device) -> bool:
    """Whether weights that the checkpoint has in FP8 stay so. GPUs that have no FP8 get them
    dequantised."""
    if config.fp8 is None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def widen_others(model: Module, stored: Container[str], placement: Placement) -> None:
    """Layers of which the checkpoint does not have all weights in FP8, which are the parameters
    `stored`, get weights of the placement's dtype."""
    for path, module in model.named_modules():
        if not isinstance(module, Module):
            continue
        slots = list(module.slots(path))
        weights = [name for name, slot in slots if len(slot.shape) == 2]
        if any(slot.scales is not None for _, slot in slots) and not all(
            name in stored for name in weights
        ):
            module.widen(placement)
