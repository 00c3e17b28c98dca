"""Attention sinks (gpt-oss; "Efficient Streaming Language Models with Attention Sinks", arXiv
2309.17453): each query head has one more score in its softmax, which is a weight of the model, is
not scaled, is never masked and has no value. So a row's weights sum to less than 1.

Our attention kernels take the sinks as an argument. `add_sinks` changes the output of kernels that
know none."""

import math

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch


@with_kernel("add_sinks_triton")
def add_sinks(output: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """Multiply the output of attention without sinks by sigmoid(log_sum - sink), in place. With Z
    the sum of a row's exponentials, that is Z / (Z + exp(sink)).

    Args:
        output: `[T, Hq, D]`, the last dimension contiguous.
        log_sums: `[T, Hq]` float32, contiguous: log2 of Z.
        sinks: `[Hq]` float32, contiguous.
    """
    factors = (log_sums * math.log(2) - sinks).sigmoid()
    output.copy_(output.float() * factors.unsqueeze(2))


# Attention sinks in Triton kernels; attention_sinks.py describes them.


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def sink_scores(sinks: tl.tensor, heads: tl.tensor) -> tl.tensor:
    """The scores of sinks of some heads, for weights that are powers of two."""
    return tl.load(sinks + heads) * LOG2_E


def add_sinks_triton(output: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """See `add_sinks`."""
    (num_rows, heads, head_dim), block_d = output.shape, triton.next_power_of_2(output.shape[2])
    assert output.stride(2) == 1 and log_sums.is_contiguous() and sinks.is_contiguous()
    block_h = min(triton.next_power_of_2(heads), max(1, 4096 // block_d))
    if num_rows:
        add_sinks_kernel[(num_rows, triton.cdiv(heads, block_h))](
            *(output, *output.stride()[:2], log_sums, sinks),
            HEADS=heads,
            HEAD_DIM=head_dim,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=4,
            **programmatic_launch(output.device),
        )


@triton.jit
def add_sinks_kernel(
    output: tl.tensor, row_stride: tl.tensor, head_stride: tl.tensor, log_sums: tl.tensor,
    sinks: tl.tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (rows, blocks of heads)."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    heads, dims = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    own = heads < HEADS
    log_sum = tl.load(log_sums + row * HEADS + heads, mask=own, other=0.0)
    sink = tl.load(sinks + heads, mask=own, other=0.0) * LOG2_E
    factor = 1.0 / (1.0 + tl.exp2(sink - log_sum))
    pointers = output + row * row_stride + heads[:, None] * head_stride + dims[None, :]
    real = own[:, None] & (dims < HEAD_DIM)[None, :]
    mixed = tl.load(pointers, mask=real, other=0.0).to(tl.float32) * factor[:, None]
    tl.store(pointers, mixed.to(output.dtype.element_ty), mask=real)
