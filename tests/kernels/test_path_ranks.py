"""What accepted paths show about ranks: a small example, and the kernel against the reference."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.test_slot_windows import (
    NUM_SLOTS,
    random_parents,
    random_tables,
    with_parents,
)
from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN
from tllm_spec.kernels.drafts.path_trees import path_ranks
from tllm_spec.kernels.slots.slot_windows import accept_windows


@pytest.mark.parametrize(
    ("num_drafts", "rows", "expected"),
    [
        # Children: 1, 2, 3 of the root, 4 and 5 of node 2, 6 of node 5.
        (6, [0, 2, 5, 6], [1, OFF_CHAIN + 1, OFF_CHAIN + 0, OFF_CHAIN + END]),
        (6, [0, 1, 1, 1], [0, END, NOTHING, NOTHING]),
        (6, [0, 2, 2, 2], [1, OFF_CHAIN + END + 2, NOTHING, NOTHING]),
        (6, [0, 0, 0, 0], [END + 3, NOTHING, NOTHING, NOTHING]),
        (2, [0, 0, 0, 0], [END + 2, NOTHING, NOTHING, NOTHING]),  # the others were not proposed
    ],
)
def test_a_path_shows_the_ranks_that_came_next_and_those_tried_in_vain(
    num_drafts: int, rows: list[int], expected: list[int]
) -> None:
    parents = torch.tensor([[-1, 0, 0, 0, 2, 2, 5]])
    lens = torch.tensor([len(dict.fromkeys(rows))])
    found = path_ranks.reference(
        parents, torch.tensor([0]), torch.tensor([num_drafts]), torch.tensor([rows]), lens, 7
    )
    assert found.tolist() == [expected]


@on_each_kernel_device
@pytest.mark.parametrize("width", [2, 9, 64])
def test_the_kernel_shows_what_the_reference_shows(device: str, width: int) -> None:
    values = set()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        tables, (parents, depth) = random_tables(seed, width), random_parents(seed, width)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: 5 + 5 * seed]
        targets = torch.randint(-1, 3, (len(slots), width), generator=generator)
        num_drafts, kv_lens = tables.num_drafts[slots], tables.kv_lens[slots]
        own = with_parents(tables, parents)
        _, lens, rows = accept_windows.reference(own, slots, kv_lens, targets, depth)
        arguments = parents, slots, num_drafts, rows.contiguous(), lens
        expected = path_ranks.reference(*arguments, width)
        found = path_ranks(*(each.to(device) for each in arguments), width)
        assert found.tolist() == expected.tolist()
        values |= set(expected.flatten().tolist())
    assert len(values) > 3
