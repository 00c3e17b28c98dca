"""A GEMM for each attention head, whose operands may have any strides: MLA's projections of queries
to latents and of latents to values.

For a few rows it is a Triton kernel: torch's batched GEMM takes no part in programmatic dependent
launch (programmatic_launch.py). Otherwise it is the plain-torch reference, which is the
definition."""

import torch

from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.shared_memory import shared_memory_bytes, stages_that_fit
from tllm_spec.kernels.triton_support import has_kernels

MAX_ROWS = 64
BLOCK_K = 128


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
    has_kernel = batch_invariant or len(x) <= MAX_ROWS
    if not (has_kernels(x.device) and len(x) and has_kernel):
        plain_head_gemm(x, weight, out)
        return
    from tllm_spec.kernels.head_gemm_triton import head_gemm_kernel

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


def plain_head_gemm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Reference of `head_gemm`."""
    torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
