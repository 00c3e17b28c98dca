"""The sum of all ranks' tensors in two steps of one kernel, for sizes at which it takes long to
send all values to all others: each rank adds a part of the values, and sends its sum to the others.

A rank sends every other rank that one's part of its values, and then raises a flag there. Once it
has the flags of all others it adds its own part in the order of the ranks, sends the sum to all of
them, and raises a second flag (rank_parts.py)."""

import torch

from tllm_spec.kernels.rank_parts import RankParts
from tllm_spec.kernels.rank_sum import serves


def two_shot_sum(
    parts: RankParts, values: torch.Tensor, add_to: torch.Tensor | None = None
) -> None:
    """As `rank_sum`, with the same bits."""
    from tllm_spec.kernels.two_shot_sum_triton import two_shot_sum_triton

    assert serves(values, parts.capacity)  # more would lie outside of the other ranks' memory
    assert add_to is None or (add_to.shape, add_to.dtype) == (values.shape, values.dtype)
    two_shot_sum_triton(parts, values, add_to)
