"""Attention sinks (gpt-oss; "Efficient Streaming Language Models with Attention Sinks", arXiv
2309.17453): each query head has one more score in its softmax, which is a weight of the model, is
not scaled, is never masked and has no value. So a row's weights sum to less than 1.

Our attention kernels take the sinks as an argument. `add_sinks` changes the output of kernels that
know none."""

import math

import torch

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("attention_sinks_triton.add_sinks_triton")
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
