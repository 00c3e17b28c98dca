"""Linear layer of FP8 activations and an FP8 weight: `y[t, n] = code_scales[t] * sum over blocks b
of scales[n, b] * sum over k in b of codes[t, k] * weight[n, k]`. The Triton kernel of scaled_linear
with both operands on FP8 tensor cores if Triton is available, otherwise the plain-torch reference.
Both are batch-invariant.

Products of codes are multiples of 2^-18 up to 2^18, so float64 holds the sum of a block exactly,
whatever the order. FP8 tensor cores sum with fewer bits than float32; each block of 128 inputs is
added to a float32 sum, in scaled_linear's order."""

import torch

from tllm_spec.kernels.dequantise import BLOCK
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.scaled_linear import MIN_PROGRAMS, launch_scaled_linear, tiling_of
from tllm_spec.kernels.shared_memory import shared_memory_bytes


@with_kernel("fp8_linear.tiled_fp8_linear")
def fp8_linear(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rounded once, after the bias and `add_to`.

    Args:
        codes: `[T, K]` float8_e4m3fn, contiguous.
        code_scales: `[T]` float32, contiguous.
        weight: `[N, K]` float8_e4m3fn, contiguous; for the reference float64 too, which it need
            not convert.
        scales: `[N, ceil(K / 128)]` float32, contiguous.
        dtype: of the output and of the rest.
        bias: `[N]`.
        add_to: `[T, N]`, any stride between rows: the output is added to it, in place.

    Returns:
        `[T, N]`: `add_to`, or a new tensor.
    """
    wide, matrix = codes.double(), weight.double().t()
    output = wide.new_zeros(len(codes), len(weight))
    for block, scale in enumerate(scales.double().t()):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        output += wide[:, own].mm(matrix[own]).mul_(scale)
    output *= code_scales.unsqueeze(1)
    for added in (bias, add_to):
        if added is not None:
            output += added
    return output.to(dtype) if add_to is None else add_to.copy_(output)


def tiled_fp8_linear(
    codes: torch.Tensor,
    code_scales: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    *,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel of `fp8_linear`."""
    (num_rows, _), features = codes.shape, weight.shape[0]
    output = add_to
    if output is None:
        output = torch.empty((num_rows, features), dtype=dtype, device=codes.device)
    assert output.dtype == dtype
    if num_rows:
        tiling = tiling_of(num_rows, codes.dtype, shared_memory_bytes(codes.device))
        tiles = -(-num_rows // tiling.rows) * -(-features // tiling.outputs)
        launch_scaled_linear(
            codes, weight, scales, bias, output, tiling,
            spreads=tiles < MIN_PROGRAMS, adds=add_to is not None, x_scales=code_scales,
        )  # fmt: skip
    return output
