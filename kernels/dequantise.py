"""FP8 weights, with a float32 scale for each row and each BLOCK inputs, as numbers of another type:
`out[n, k] = scales[n, k // BLOCK] * weight[n, k]`. A Triton kernel if Triton is available,
otherwise the plain-torch reference; both have the same bits.

The product is a float32, which is rounded to the type of `out`. In float16, results past 65504 are
infinite, and those below 2^-14 lose bits."""

import torch

from tllm_spec.kernels.dispatch import with_kernel

BLOCK = 128  # inputs that share a scale
# A program has 128 threads, and each of them two loads of 16 bytes under way.
BLOCKS_OF_PROGRAM, NUM_WARPS = 32, 4


def check_scaled(weight: torch.Tensor, scales: torch.Tensor) -> None:
    """Asserts the layout of a weight `[..., N, K]` and its scales."""
    assert weight.dtype == torch.float8_e4m3fn and weight.is_contiguous()
    assert scales.dtype == torch.float32 and scales.is_contiguous()
    assert scales.shape == (*weight.shape[:-1], -(-weight.shape[-1] // BLOCK))


def dequantised(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """weight `[..., N, K]` in FP8 times scales `[..., N, ceil(K / 128)]`, in `dtype`."""
    by_input = scales.repeat_interleave(BLOCK, -1)[..., : weight.shape[-1]]
    return weight.float().mul_(by_input).to(dtype)


@with_kernel("dequantise_triton.dequantise_rows_triton")
def dequantise_rows(weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Fills `out`.

    Args:
        weight: `[N, K]` float8_e4m3fn, contiguous.
        scales: `[N, ceil(K / 128)]` float32, contiguous.
        out: `[N, K]` bfloat16, float16 or float32, contiguous.
    """
    out.copy_(dequantised(weight, scales, out.dtype))
