"""Many rows by an FP8 weight, with torch's GEMM: a slice of the weight's rows is dequantised to a
scratch tensor, multiplied, and followed by the next slice. Most weights are one slice: on an H100,
slices that stay in the L2 cache were not faster."""

import torch

from tllm_spec.kernels.dequantise import dequantise_rows

MAX_BYTES = 128 << 20  # of the scratch tensor
SLICE_OUTPUTS = 128  # a slice has a multiple of them


def slice_outputs(out_features: int, in_features: int) -> int:
    """Outputs of a slice: of as few and as equal ones as MAX_BYTES allows."""
    most = max(MAX_BYTES // (2 * in_features * SLICE_OUTPUTS), 1) * SLICE_OUTPUTS
    number = -(-out_features // most)
    return -(-out_features // (number * SLICE_OUTPUTS)) * SLICE_OUTPUTS


def multiply_slices(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    size: int,
    *,
    adds: bool,
) -> None:
    """Inputs and outputs are `launch_scaled_linear`'s. size: rows of the weight in a slice. A
    slice's weights are rounded to x's type. With `adds` the bias is added to the output first, and
    the sum is rounded. The product may be rounded before it is added to the output."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    assert x.stride(1) == 1 == output.stride(1) and output.shape == (num_rows, out_features)
    if bias is not None and adds:
        output.add_(bias)
    elif bias is not None:
        output.copy_(bias)
    scratch = x.new_empty(min(size, out_features), in_features)
    for first in range(0, out_features, size):
        own = slice(first, first + size)
        part = output[:, own]  # torch passes its row stride to cuBLAS, so nothing is copied
        matrix = scratch[: part.shape[1]]
        dequantise_rows(weight[own], scales[own], matrix)
        if adds or bias is not None:
            part.addmm_(x, matrix.t())
        else:
            torch.mm(x, matrix.t(), out=part)
