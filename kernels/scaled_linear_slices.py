"""Many rows by an FP8 weight, with torch's GEMM: a slice of the weight's rows is dequantised to a
scratch tensor, multiplied, and followed by the next slice."""

import functools

import torch

from tllm_spec.kernels.dequantise import dequantise_rows

CACHED_BYTES = (
    24 << 20
)  # about half of the L2 cache of an H100 or H200, so that a slice stays there
MAX_BYTES = 128 << 20  # of the scratch tensor
SLICE_OUTPUTS = 128  # a slice has a multiple of them
# A GEMM of many rows has such tiles, and a multiprocessor of an H100 or H200 one at a time.
TILE_ROWS, TILE_OUTPUTS, MULTIPROCESSORS = 128, 256, 132
# Of an H100: the memory, and FLOPs of one multiprocessor in 16 bits.
BYTES_PER_S, FLOPS = 3.0e12, 5.9e12


def slice_outputs(num_rows: int, out_features: int, in_features: int) -> int:
    """Outputs of a slice with which the whole takes the least time. Large slices fill the
    multiprocessors; small ones need not be written to memory and read again."""
    return _slice_outputs(-(-num_rows // TILE_ROWS), out_features, in_features)


@functools.cache
def _slice_outputs(row_tiles: int, out_features: int, in_features: int) -> int:
    def seconds(outputs: int) -> float:
        """For each input and output."""
        num_bytes = 1 if 2 * in_features * outputs <= CACHED_BYTES else 1 + 2 + 2
        waves = -(-row_tiles * -(-outputs // TILE_OUTPUTS) // MULTIPROCESSORS)
        return num_bytes / BYTES_PER_S + waves * 2 * TILE_ROWS * TILE_OUTPUTS / FLOPS / outputs

    wanted = -(-out_features // SLICE_OUTPUTS)
    most = min(max(MAX_BYTES // (2 * in_features * SLICE_OUTPUTS), 1), wanted)
    return min(range(most * SLICE_OUTPUTS, 0, -SLICE_OUTPUTS), key=seconds)


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
    the sum is rounded, too."""
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
