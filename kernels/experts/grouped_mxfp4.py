"""The grouped GEMMs of grouped_gemm.py with weights in MXFP4, for blocks of up to 64 rows: a CUDA
kernel in which codes become bfloat16 in registers. A row has the same bits as from the Triton
kernel, which runs the rest."""

import ctypes
import functools
from dataclasses import dataclass

import torch

from tllm_spec.kernels import nvrtc
from tllm_spec.kernels.experts.permute import ExpertRows
from tllm_spec.kernels.gemm.int4_weights import BLOCK, HALF


@dataclass(frozen=True)
class Tiling:
    """A tile of the weight has 16 rows for each of the `groups` of each of the `warps`. `depth`
    stages of `blocks` blocks of inputs are in shared memory. `ctas` share a multiprocessor."""

    warps: int
    groups: int
    blocks: int
    depth: int
    ctas: int

    @property
    def outputs(self) -> int:
        """Rows of a tile; those of a gated layer are half gates, half ups."""
        return 16 * self.warps * self.groups

    def shared_bytes(self, block_rows: int) -> int:
        """Codes, exponents and rows of x."""
        return self.depth * self.blocks * (self.outputs * (HALF + 4) + block_rows * BLOCK * 2)


# By rows of a block, and whether the layer is gated. Shared memory that is left caches exponents.
TILINGS = {
    (16, True): Tiling(4, 2, 2, 2, 3),
    (16, False): Tiling(8, 1, 2, 3, 2),
    **{(rows, gated): Tiling(4, 2, 1, 3, 3) for rows in (32, 64) for gated in (True, False)},
}


def num_tiles(features: int, gated: bool, tiling: Tiling) -> int:
    """features: columns of the output."""
    return -(-features // (tiling.outputs // 2 if gated else tiling.outputs))


def definitions(block_rows: int, in_features: int, gated: bool) -> tuple[tuple[str, int], ...]:
    """Macros of the source."""
    tiling = vars(TILINGS[block_rows, gated])
    return (
        *(("BFLOAT16", 1), ("IN", in_features), ("GATED", gated), ("ROWS", block_rows)),
        *((name.upper(), value) for name, value in tiling.items()),
    )


@functools.cache
def _kernel(device: int, macros: tuple[tuple[str, int], ...]) -> nvrtc.Kernel:
    cubin = nvrtc.compile_source("grouped_mxfp4.cu", "sm_90", macros)
    return nvrtc.Kernel(cubin, "grouped_mxfp4", nvrtc.SHARED_BYTES)


class _Arguments(ctypes.Structure):
    """The kernel's argument: same layout as `GroupedGemm` in grouped_mxfp4.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "bias", "weight", "words", "output", "order", "blocks", "num_blocks")
        ),
        *((name, ctypes.c_int) for name in ("room", "features", "top_k", "tiles", "is_clamped")),
        *((name, ctypes.c_float) for name in ("limit", "slope")),
    )


def serves_mxfp4(x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows, gated: bool) -> bool:
    """Whether the kernel supports the device and sizes of x and the weight, which is exact in the
    type of x."""
    tiling = TILINGS.get((rows.block_rows, gated))
    return (
        x.is_cuda
        and tiling is not None
        and weight.shape[1] >= tiling.outputs
        and x.shape[1] % 8 == 0  # they are copied 16 bytes at a time
        # The tensor cores that Triton takes on other devices may add in another order.
        and torch.cuda.get_device_capability(x.device)[0] == 9
        and nvrtc.why_unavailable(x.device.index or 0) is None
    )


def grouped_mxfp4(
    x: torch.Tensor,
    weight: torch.Tensor,
    words: torch.Tensor,
    bias: torch.Tensor | None,
    rows: ExpertRows,
    output: torch.Tensor,
    limit: float | None,
    slope: float,
    *,
    gated: bool,
) -> None:
    """Fills the output of `gate_up_silu`, or of `down`. The kernel must serve these tensors.

    Args:
        x, weight, words, bias, rows, limit: see there; words are the scales.
        output: `[P, features]`, contiguous.
        slope: of the gate's sigmoid.
    """
    features, room, device = output.shape[1], rows.blocks.shape[1], x.device.index or 0
    tiling = TILINGS[rows.block_rows, gated]
    tiles = num_tiles(features, gated, tiling)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    grid, shared = min(room * tiles, processors * tiling.ctas), tiling.shared_bytes(rows.block_rows)
    operands = (x, bias, weight, words, output, rows.order, rows.blocks, rows.num_blocks)
    arguments = _Arguments(
        *(None if tensor is None else tensor.data_ptr() for tensor in operands),
        *(room, features, rows.top_k, tiles, limit is not None),
        *(limit or 0.0, slope),
    )
    kernel = _kernel(device, definitions(rows.block_rows, x.shape[1], gated))
    stream = torch.cuda.current_stream(device).cuda_stream
    kernel.launch(nvrtc.Launch(grid, 32 * tiling.warps, 1, shared), stream, arguments)
