"""The Triton kernel of dequantise.py, which describes inputs and outputs. Importing this file
imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.dequantise import BLOCK, BLOCKS_OF_PROGRAM, NUM_WARPS, check_scaled
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin


def dequantise_rows_triton(weight: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """See `dequantise_rows`."""
    check_scaled(weight, scales)
    assert out.shape == weight.shape and out.is_contiguous()
    num_blocks = scales.numel()
    dequantise_kernel[(-(-num_blocks // BLOCKS_OF_PROGRAM),)](
        weight,
        scales,
        out,
        num_blocks,
        IN=weight.shape[1],
        BLOCK=BLOCK,
        BLOCKS=BLOCKS_OF_PROGRAM,
        num_warps=NUM_WARPS,
        **programmatic_launch(out.device),
    )


@triton.jit(do_not_specialize=["num_blocks"])  # type: ignore[untyped-decorator]  # triton has no types
def dequantise_kernel(
    weight: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_blocks: tl.tensor,
    IN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A program has BLOCKS of the `num_blocks` blocks of inputs with a scale; all blocks of a row
    follow each other."""
    begin(PDL)
    blocks = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    per_row = tl.cdiv(IN, BLOCK)
    inputs = (blocks % per_row * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    places = (blocks // per_row).to(tl.int64)[:, None] * IN + inputs
    real = (blocks < num_blocks)[:, None] & (inputs < IN)
    scale = tl.load(scales + blocks, mask=blocks < num_blocks, other=0.0)
    # Each weight is read once: what was written should stay in the L2 cache instead.
    w = tl.load(weight + places, mask=real, other=0.0, eviction_policy="evict_first")
    values = w.to(tl.float32) * scale[:, None]
    tl.store(out + places, values.to(out.dtype.element_ty), mask=real)
