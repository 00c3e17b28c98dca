"""The tensors of a checkpoint with FP8 weights, joined with their scales."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tllm_spec.models.checkpoint import checkpoint_tensors
from tllm_spec.models.formats.fp8_formats import INPUT_SCALES, Fp8Format
from tllm_spec.models.formats.fp8_scaled import Fp8Tensor


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
    # A weight and its scales may be in different files; all scales together are small.
    scales = dict(checkpoint_tensors(path, lambda name: name.endswith(suffix) and is_wanted(name)))
    input_scales = _input_scales(path, form, wants)
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
        input_scale = input_scales.get(name.removesuffix(".weight"))
        yield name, Fp8Tensor(tensor, form.row_scales(scale, (rows, columns), name), input_scale)
    if scales:
        raise ValueError(f"{path} has scales of tensors that are not FP8: {sorted(scales)[:10]}.")


def _input_scales(
    path: Path, form: Fp8Format, wants: Callable[[str], bool]
) -> dict[str, torch.Tensor]:
    """The static scales of activations `[]`, by module."""
    if form.activations is None or form.activations.shared_by != "tensor":
        return {}

    def is_wanted(name: str) -> bool:
        module, _, last = name.rpartition(".")
        return last in INPUT_SCALES and wants(f"{module}.weight")

    found = {}
    for name, scale in checkpoint_tensors(path, is_wanted):
        if scale.numel() != 1 or not scale.is_floating_point() or not scale.item() > 0:
            raise ValueError(f"{path}: {name} is {scale.tolist()}; it must be a number above 0.")
        found[name.rpartition(".")[0]] = scale.float().view(())
    return found
