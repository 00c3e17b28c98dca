"""The exchange of offered tokens in one kernel, over the lines of sums."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import INTERPRETED, on_each_kernel_device
from tests.kernels.process_ranks import run_at_once
from tests.kernels.test_rank_sum import lines_of, memory_of, parts_of
from tllm_spec.kernels.parallel.rank_sum import (
    rank_best,
    rank_best_reference,
    rank_sum,
    rank_sum_reference,
)

RANKS = 3
NUM_ROWS = (5, 200)  # one and two blocks


def offers_of(num_rows: int) -> torch.Tensor:
    """`[R, RANKS, 2]` of columns in the order of the ranks, with ties, infinities, and offers of
    rows with a NaN or without a number."""
    generator = torch.Generator().manual_seed(num_rows)
    values = torch.randint(-2, 3, (num_rows, RANKS), generator=generator).float()
    columns = torch.arange(RANKS) * 1000 + torch.randint(
        0, 1000, (num_rows, RANKS), generator=generator
    )
    values[1], columns[1] = -torch.inf, -1
    values[2], columns[2, 1] = torch.inf, -1  # the rank's row has a NaN
    values[3, 0], columns[3, 0] = -torch.inf, -1
    return torch.stack((values.view(torch.int32), columns.int()), 2)


@on_each_kernel_device
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_the_best_offer_of_the_others_lines_and_the_own_ones_is_chosen(
    device: str, num_rows: int
) -> None:
    memory, offers = memory_of(RANKS, device), offers_of(num_rows)
    lines, num_words = lines_of(1, memory), 2 * num_rows
    for other in (0, 2):  # the first exchange is in the second buffer
        sent = offers[:, other].flatten().long() & 0xFFFFFFFF | 1 << 32
        memory[1][1, other, :num_words] = sent.to(device)
    found = rank_best(lines, offers[:, 1].contiguous().to(device))
    expected = rank_best_reference(offers)
    assert torch.equal(found.cpu(), expected) and expected[1] == expected[2] == -1 < expected[3]
    own = offers[:, 1].flatten().long() & 0xFFFFFFFF | 1 << 32
    assert all(torch.equal(memory[other][1, 1, :num_words].cpu(), own) for other in (0, 2))


@pytest.mark.skipif(not INTERPRETED, reason="the ranks are processes that share memory")
def test_interpreted_exchanges_and_sums_use_the_same_lines_in_turn() -> None:
    memory = [each.share_memory_() for each in memory_of(RANKS)]
    parts, offers = parts_of(RANKS, 300, torch.float32, 1), offers_of(NUM_ROWS[0])
    found = torch.zeros(RANKS, 2, dtype=torch.bool).share_memory_()

    def run(rank: int) -> None:
        lines = lines_of(rank, memory)
        for _ in range(3):
            values = parts[rank].clone()
            rank_sum(lines, values)
            tokens = rank_best(lines, offers[:, rank].contiguous())
        found[rank, 0] = torch.equal(values, rank_sum_reference(parts))
        found[rank, 1] = torch.equal(tokens, rank_best_reference(offers))

    run_at_once(RANKS, run)
    assert found.all()
