"""A linear layer for up to 8 rows, fused with what stands around it: RMSNorm of its input before it; bias, SiLU gate or
the running sum after it.

`few_row_linear` runs one CUDA kernel where it can (`serves`) and its plain-torch twin elsewhere. Its time is that of
reading the weights once. For more rows torch's own products are faster, even with the ops around them. It does not
know what the layer is for.

The kernel takes another way to the norm than the twin: x times the norm's weight is rounded, and the division by the
root mean square comes at the very end, where the twin rounds the whole norm. Everything else is float32, rounded once.
"""

import functools
from dataclasses import dataclass

import torch

from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.rms_norm import plain_rms_norm, rms_norm
from tllm_spec.kernels.silu_and_mul import plain_silu_and_mul

MAX_ROWS = 8
WARPS = 8
# A tile: 16 rows of the weights for each group of warps.
ROW_GROUPS = (4, 2, 1)
# CTAs that share the columns of a tile. More would leave multiprocessors idle: not every cluster of 4 finds a place.
SPLITS = (2, 1)
STEP_COLUMNS = 64
# Steps of 2 KB in a warp's ring, where there is room for them: on an H200 more do not help.
MAX_DEPTH, MIN_DEPTH = 8, 3
SHARED_BYTES = 227 << 10


@dataclass(frozen=True)
class NormWeight:
    """RMSNorm of the input."""

    weight: torch.Tensor
    """`[K]`."""
    eps: float


def few_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: NormWeight | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """`norm(x) W^T + bias`; where gated, the SiLU of the first half of that times the second; added to `add_to`.

    Args:
        x: `[T, K]`, any stride between rows.
        weight: `[N, K]`, contiguous.
        bias: `[N]`.
        norm: of x; None: none.
        gated: `[T, N / 2]` comes out.
        add_to: the running sum, of the output's shape, any stride between rows; changed in place and returned.
    """
    if not serves(x, weight):
        return plain_few_row_linear(x, weight, bias=bias, norm=norm, gated=gated, add_to=add_to)
    features = weight.shape[0] // 2 if gated else weight.shape[0]
    output = x.new_empty(x.shape[0], features) if add_to is None else add_to
    assert output.shape == (x.shape[0], features)
    if norm is not None and x.dtype == torch.float16:  # x times the norm's weight alone might overflow
        x, norm = rms_norm(x, norm.weight, norm.eps), None
    _launch(x, weight, bias, norm, gated, add_to, output)
    return output


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: NormWeight | None,
    gated: bool,
    add_to: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    assert x.stride(1) == output.stride(1) == 1 and weight.is_contiguous()
    (rows, features), (out_features, in_features) = output.shape, weight.shape
    device = x.device.index or 0
    prepared = _prepare(device, x.dtype, rows, in_features, features, norm is not None, gated)
    optional = (bias, None if norm is None else norm.weight, add_to)
    prepared.kernel.launch(
        prepared.launch,
        torch.cuda.current_stream(device).cuda_stream,
        (
            x.data_ptr(),
            weight.data_ptr(),
            *(0 if tensor is None else tensor.data_ptr() for tensor in optional),
            output.data_ptr(),
            rows,
            out_features,
            in_features,
            x.stride(0),
            output.stride(0),
            0.0 if norm is None else norm.eps,
            prepared.num_tiles,
        ),
        (nvrtc.POINTER,) * 6 + (nvrtc.INT,) * 5 + (nvrtc.FLOAT, nvrtc.INT),
    )


def serves(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel does: device, type and size."""
    return (
        x.is_cuda
        and 0 < x.shape[0] <= MAX_ROWS
        and x.dtype in (torch.bfloat16, torch.float16)
        and bool(_splits_that_fit(x.shape[0], weight.shape[1]))
        and why_unavailable(x.device.index or 0) is None
    )


@functools.cache
def why_unavailable(device: int) -> str | None:
    """Why no product runs as the kernel on this CUDA device, or None."""
    if torch.cuda.get_device_capability(device) < (9, 0):  # clusters and programmatic dependent launch
        return "it needs compute capability 9.0"
    return None if nvrtc.is_installed() else "cuda-python is not installed; pip install tllm_spec[cuda]"


@functools.cache
def _splits_that_fit(rows: int, in_features: int) -> tuple[int, ...]:
    return tuple(
        splits
        for splits in SPLITS
        if in_features % (splits * STEP_COLUMNS) == 0 and _depth(rows, in_features, splits) >= MIN_DEPTH
    )


def _shared_bytes(rows: int, in_features: int, splits: int, depth: int) -> int:
    """Rings, x, the sums of two tiles, and squares: by warp, and by CTA of the cluster."""
    rings = WARPS * depth * 16 * STEP_COLUMNS * 2
    staged = rows * (in_features // splits * 2 + 16)
    return rings + staged + 4 * (2 * WARPS * 16 * 8 + rows * WARPS + splits * 8)


def _depth(rows: int, in_features: int, splits: int) -> int:
    """The deepest ring that fits beside the rest."""
    left = SHARED_BYTES - _shared_bytes(rows, in_features, splits, 0)
    return min(MAX_DEPTH, left // (WARPS * 16 * STEP_COLUMNS * 2))


@dataclass(frozen=True)
class _Prepared:
    """A kernel and the shape of its launch."""

    kernel: nvrtc.Kernel
    launch: nvrtc.Launch
    num_tiles: int


@functools.cache
def _prepare(
    device: int, dtype: torch.dtype, rows: int, in_features: int, features: int, norm: bool, gated: bool
) -> _Prepared:
    """Chooses the size of a tile and the shares of its columns with which the multiprocessor that has the most rows of
    the weights has the fewest."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    candidates = []
    for splits in _splits_that_fit(rows, in_features):
        for row_groups in ROW_GROUPS:
            num_tiles = -(-features // (row_groups * (8 if gated else 16)))
            num_clusters = min(num_tiles, processors // splits)
            most = -(-num_tiles // num_clusters) * row_groups / splits
            candidates.append((most, splits, row_groups, num_clusters, num_tiles))
    _, splits, row_groups, num_clusters, num_tiles = min(candidates, key=lambda candidate: candidate[0])
    depth = _depth(rows, in_features, splits)
    shared = _shared_bytes(rows, in_features, splits, depth)
    launch = nvrtc.Launch(num_clusters * splits, 32 * WARPS, splits, shared)
    return _Prepared(_kernel(device, definitions(dtype, row_groups, depth, norm, gated)), launch, num_tiles)


def definitions(
    dtype: torch.dtype, row_groups: int, depth: int, norm: bool, gated: bool
) -> tuple[tuple[str, int], ...]:
    """The source's macros."""
    flags = (("BFLOAT16", dtype == torch.bfloat16), ("NORM", norm), ("GATED", gated))
    return (*flags, ("ROW_GROUPS", row_groups), ("DEPTH", depth))


@functools.cache
def _kernel(device: int, macros: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = nvrtc.compile_source("few_row_linear.cu", f"sm_{major}{minor}", macros)
    return nvrtc.Kernel(cubin, "few_row_linear", SHARED_BYTES)


def plain_few_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: NormWeight | None = None,
    gated: bool = False,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The twin of `few_row_linear`."""
    if norm is not None:
        x = plain_rms_norm(x, norm.weight, norm.eps)
    output = torch.nn.functional.linear(x, weight, bias)
    if gated:
        output = plain_silu_and_mul(output)
    return output if add_to is None else add_to.add_(output)
