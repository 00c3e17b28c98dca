"""Many rows by a quantised weight, with torch's GEMM: a slice of the weight's rows is dequantised
to a scratch tensor, multiplied, and followed by the next slice. Most weights are one slice: on an
H100, slices that stay in the L2 cache were not faster."""

import torch

from tllm_spec.kernels.dequantise import dequantise_rows
from tllm_spec.kernels.int4_weights import dequantise_int4

MAX_BYTES = 128 << 20  # of each scratch tensor: a slice's weights, and its float32 sums
SLICE_OUTPUTS = 128  # a slice has a multiple of them


def slice_outputs(num_rows: int, out_features: int, in_features: int, *, has_sums: bool) -> int:
    """Outputs of a slice: of as few and as equal ones as MAX_BYTES allows. has_sums: whether
    something is added to the product, which needs float32 sums."""
    output_bytes = max(2 * in_features, 4 * num_rows if has_sums else 0)
    most = max(MAX_BYTES // (output_bytes * SLICE_OUTPUTS), 1) * SLICE_OUTPUTS
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
    group: int = 0,
) -> None:
    """Inputs and outputs are `launch_scaled_linear`'s. size: rows of the weight in a slice.

    A slice's weights are rounded to x's type. Results are rounded once, after `bias` and what the
    output held have been added in float32. torch may let cuBLAS add partial sums in 16 bits
    (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`)."""
    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    assert x.stride(1) == 1 == output.stride(1) and output.shape == (num_rows, out_features)
    scratch = x.new_empty(min(size, out_features), in_features)
    for first in range(0, out_features, size):
        own = slice(first, first + size)
        part = output[:, own]  # torch passes its row stride to cuBLAS, so nothing is copied
        matrix = scratch[: part.shape[1]]
        if group:
            dequantise_int4(weight[own], scales[own], group, matrix)
        else:
            dequantise_rows(weight[own], scales[own], matrix)
        if not adds and bias is None:
            torch.mm(x, matrix.t(), out=part)
            continue
        sums = _float32_product(x, matrix)
        if bias is not None:
            sums += bias[own]
        if adds:
            torch.add(sums, part, out=part)
        else:
            part.copy_(sums)
        del sums  # the next slice's take their memory


def _float32_product(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """x `[T, K]` times matrix `[N, K]`, not rounded."""
    if x.is_cuda:
        return torch.mm(x, matrix.t(), out_dtype=torch.float32)
    return x.float().mm(matrix.float().t())  # CPUs have no GEMM of this kind
