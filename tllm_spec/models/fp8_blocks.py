"""FP8 checkpoints with a float32 scale for each block of 128 x 128 weights (DeepSeek V3, arXiv
2412.19437, section 3.3.2), dequantised while they are loaded."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tllm_spec.models.checkpoint import checkpoint_tensors

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"


def dequantised_tensors(
    path: Path, wants: Callable[[str], bool]
) -> Iterator[tuple[str, torch.Tensor]]:
    """As `checkpoint_tensors`, with FP8 weights in bfloat16 and without their scales.

    Raises:
        ValueError: a scale is missing, surplus or of a wrong shape.
    """
    # A weight and its scale may be in different files; all scales together are small.
    scales = dict(
        checkpoint_tensors(path, lambda name: name.endswith(SCALE_SUFFIX) and wants(name))
    )
    others = checkpoint_tensors(path, lambda name: wants(name) and not name.endswith(SCALE_SUFFIX))
    for name, tensor in others:
        if tensor.dtype == torch.float8_e4m3fn:
            scale = scales.pop(name + SCALE_SUFFIX, None)
            if scale is None:
                raise ValueError(f"{path} has no {name}{SCALE_SUFFIX} for the FP8 tensor {name}.")
            tensor = dequantised(name, tensor, scale)
        yield name, tensor
    if scales:
        raise ValueError(f"{path} has scales of tensors that are not FP8: {sorted(scales)[:10]}.")


def dequantised(name: str, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight `[N, K]` in FP8 times the scale of its block, `[ceil(N / 128), ceil(K / 128)]`, in
    bfloat16. Raises ValueError, with the tensor's name, for a scale of another shape."""
    wanted = [-(-size // BLOCK) for size in weight.shape]
    if list(scale.shape) != wanted:
        raise ValueError(
            f"{name}{SCALE_SUFFIX} has the shape {list(scale.shape)}; a weight of "
            f"{list(weight.shape)} needs {wanted}."
        )
    rows, columns = weight.shape
    by_column = scale.float().repeat_interleave(BLOCK, 1)[:, :columns]
    result = torch.empty(weight.shape, dtype=torch.bfloat16)
    for block, factors in enumerate(by_column):
        own = slice(block * BLOCK, min((block + 1) * BLOCK, rows))
        result[own] = (weight[own].float() * factors).bfloat16()
    return result
