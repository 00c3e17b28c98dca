"""A GEMM for each attention head, whose operands may have any strides: MLA's projections of queries
to latents and of latents to values.

For a few rows it is a Triton kernel: torch's batched GEMM takes no part in programmatic dependent
launch (programmatic_launch.py). Otherwise it is the plain-torch reference, which is the
definition."""

import torch

from tllm_spec.kernels.dispatch import with_kernel

MAX_ROWS = 64  # of the kernel that is not batch-invariant


@with_kernel("head_gemm_triton.head_gemm_triton")
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
