"""A GEMM for each attention head, whose operands may have any strides: MLA's projections of queries
to latents and of latents to values.

For a few rows it is a Triton kernel: torch's batched GEMM takes no part in programmatic dependent
launch (programmatic_launch.py). Otherwise it is the plain-torch reference, which is the
definition."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import (
    begin,
    programmatic_launch,
    shared_memory_bytes,
    stages_that_fit,
)

MAX_ROWS = 64  # of the kernel that is not batch-invariant


@with_kernel("head_gemm_triton")
def head_gemm(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, batch_invariant: bool = False
) -> None:
    """`out[t, h] = x[t, h] @ weight[h]`, summed in float32 and rounded once.

    Args:
        x: `[T, H, K]`, contiguous along K.
        weight: `[H, K, N]`, contiguous along K or N.
        out: `[T, H, N]`, contiguous along N; overwritten.
        batch_invariant: whether a row's bits are the same for any other rows; slower.
    """
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))


BLOCK_K = 128


def head_gemm_triton(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, batch_invariant: bool = False
) -> None:
    """See `head_gemm`."""
    if not len(x) or (len(x) > MAX_ROWS and not batch_invariant):
        head_gemm.reference(x, weight, out)
        return
    (rows, heads, depth), width = x.shape, weight.shape[2]
    assert x.stride(2) == out.stride(2) == 1 and 1 in weight.stride()[1:]
    assert weight.shape == (heads, depth, width) and out.shape == (rows, heads, width)
    block_m = MAX_ROWS if batch_invariant or rows > 32 else 16 if rows <= 16 else 32
    # With 16 heads 128 programs, which is about one for each multiprocessor.
    block_n = 64 if width >= 512 else 16
    stage_bytes = BLOCK_K * (block_m + block_n) * x.element_size()
    head_gemm_kernel[(heads, -(-width // block_n), -(-rows // block_m))](
        *(x, *x.stride()[:2], weight, *weight.stride(), out, *out.stride()[:2]),
        *(rows, depth, width),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        WIDEN=x.device.type == "cpu",  # the interpreter cannot multiply bfloat16
        num_warps=4,
        num_stages=stages_that_fit(3, stage_bytes, shared_memory_bytes(x.device)),
        **programmatic_launch(x.device),
    )


@triton.jit(do_not_specialize=["rows"])
def head_gemm_kernel(
    x: tl.tensor, x_row_stride: tl.tensor, x_head_stride: tl.tensor, weight: tl.tensor,
    weight_head_stride: tl.tensor, weight_depth_stride: tl.tensor, weight_width_stride: tl.tensor,
    out: tl.tensor, out_row_stride: tl.tensor, out_head_stride: tl.tensor, rows: tl.tensor,
    depth: tl.tensor, width: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDEN: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
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
