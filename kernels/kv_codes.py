"""Numbers of a KV pool in FP8 (E4M3): a code is a number of the model's type divided by a constant
scale, rounded to nearest, ties to even; larger ones saturate. So a token's codes depend on nothing
but the token. Attention multiplies by codes, which every type holds exactly: the scale of keys is
part of the softmax's, and that of values multiplies the result."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.quantise_rows import LARGEST

CODES = torch.float8_e4m3fn


@dataclass(frozen=True)
class KVScales:
    """What a layer's codes are multiplied by. `key`: also of MLA's latents and shared keys."""

    key: float = 1.0
    value: float = 1.0


UNSCALED = KVScales()


def encoded(numbers: torch.Tensor, scale: float) -> torch.Tensor:
    """The codes of `numbers`. A NaN stays one."""
    # By the reciprocal in float32, as in kv_codes_triton.py and window_stage.cuh.
    return (numbers.float() * (1 / scale)).clamp_(-LARGEST, LARGEST).to(CODES)


def times(output: torch.Tensor, scale: float) -> torch.Tensor:
    """`output` multiplied by a scale of codes. Without codes nothing is launched."""
    return output if scale == 1.0 else output * scale


def movable(stored: torch.Tensor) -> torch.Tensor:
    """A view of the same shape, of a type that torch can scatter on every device."""
    return stored.view(torch.uint8) if stored.dtype == CODES else stored
