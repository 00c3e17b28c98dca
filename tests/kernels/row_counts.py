"""Rows of a round for tests: given how many each request has."""

from collections.abc import Sequence

import torch

from tllm_spec.kernels.slots.round_rows import RoundRows


def rows_of(counts: Sequence[int], window: int = 1, device: str = "cpu") -> RoundRows:
    """A rectangle if all counts are equal. window: the least W."""
    if len(set(counts)) < 2 and window <= max(counts, default=1):
        return RoundRows.rectangle(len(counts), max(counts, default=1))
    return ragged_rows(counts, max(*counts, window), device)


def ragged_rows(counts: Sequence[int], window: int, device: str = "cpu") -> RoundRows:
    """With offsets, as the executor makes them."""
    offsets = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    return RoundRows(len(counts), window, sum(counts), offsets)
