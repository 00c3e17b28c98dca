"""Writes a round's results into a ring buffer in host memory: on CUDA a Triton kernel that writes
there directly, elsewhere the plain-torch reference.

A separate copy would cost the host a call per round, and the device a gap between two graphs."""

import torch

from tllm_spec.kernels.dispatch import with_kernel


@with_kernel("send_results_triton.send_results_triton", argument=1)
def send_results(
    ring: torch.Tensor, number: torch.Tensor, new_lens: torch.Tensor, new_tokens: torch.Tensor
) -> None:
    """Writes entry `number` modulo D, and increments `number`.

    Args:
        ring: `[D, >= 1 + N * (W+1)]` int64, pinned if the rest is on CUDA. An entry is its number,
            then for each request its number of new tokens and all of its W tokens.
        number: `[1]` int64: number of the results written before.
        new_lens: `[N]` int64.
        new_tokens: `[N, W]` int64.
    """
    table = torch.cat((new_lens.unsqueeze(1), new_tokens), dim=1)
    entry = torch.cat((number, table.flatten()))
    assert ring.shape[1] >= len(entry)
    ring[number % len(ring), : len(entry)] = entry
    number += 1
