"""The Triton kernel of head_gemm.py, which describes inputs and outputs. Importing this file
imports Triton."""

import triton
import triton.language as tl

from tllm_spec.kernels.programmatic_launch_triton import begin


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]  # triton has no types
def head_gemm_kernel(
    x: tl.tensor,
    x_row_stride: tl.tensor,
    x_head_stride: tl.tensor,
    weight: tl.tensor,
    weight_head_stride: tl.tensor,
    weight_depth_stride: tl.tensor,
    weight_width_stride: tl.tensor,
    out: tl.tensor,
    out_row_stride: tl.tensor,
    out_head_stride: tl.tensor,
    rows: tl.tensor,
    depth: tl.tensor,
    width: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Grid (heads, blocks of the width, blocks of rows)."""
    begin(PDL)
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    dot_type: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    x_rows = x + head * x_head_stride + row[:, None] * x_row_stride
    columns = weight + head * weight_head_stride + column[None, :] * weight_width_stride
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, depth, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        own = (row < rows)[:, None] & (k < depth)[None, :]
        values = tl.load(x_rows + k[None, :], mask=own, other=0.0).to(dot_type)
        real = (k < depth)[:, None] & (column < width)[None, :]
        weights = tl.load(columns + k[:, None] * weight_depth_stride, mask=real, other=0.0)
        total = tl.dot(values, weights.to(dot_type), total, input_precision="ieee")
    targets = out + head * out_head_stride + row[:, None] * out_row_stride + column[None, :]
    kept = (row < rows)[:, None] & (column < width)[None, :]
    tl.store(targets, total.to(out.dtype.element_ty), mask=kept)
