"""The best token among those that all ranks offer, in one kernel, of which each rank runs one at
the same time: every rank writes its offers into the memory of all others (rank_lines.py)."""

import torch

from tllm_spec.kernels.rank_lines import RankLines

MAX_TOKEN = torch.iinfo(torch.int32).max


def rank_best(lines: RankLines, offers: torch.Tensor) -> torch.Tensor:
    """The best column of all ranks' offers (`offer_token`): this rank's, contiguous `[R, 2]` int32,
    to `[R]` int64. Ties go to the lowest column; -1 if a rank offers a NaN, or none offers a
    number."""
    from tllm_spec.kernels.rank_best_triton import rank_best_triton

    assert offers.numel() <= lines.capacity  # more would lie outside of the other ranks' memory
    return rank_best_triton(lines, offers)


def rank_best_reference(offers: torch.Tensor) -> torch.Tensor:
    """`rank_best` of the offers of all ranks, `[R, ranks, 2]`."""
    values = offers[..., 0].contiguous().view(torch.float32)
    is_best = values == values.amax(1, keepdim=True)
    return torch.where(is_best, offers[..., 1], MAX_TOKEN).amin(1).long()
