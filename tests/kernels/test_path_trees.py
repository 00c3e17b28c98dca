"""Trees of paths, and what accepted paths show about ranks."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.test_slot_windows import NUM_SLOTS, random_parents, random_tables, with_parents
from tllm_spec.config.draft_shape import END, NOTHING, OFF_CHAIN
from tllm_spec.kernels.drafts.path_trees import path_ranks, path_trees
from tllm_spec.kernels.slots.slot_windows import accept_windows


def random_paths(
    seed: int, batch: int, number: int, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    paths = torch.randint(0, 3, (batch, number, depth), generator=generator)
    return paths, torch.randint(0, depth + 1, (batch, number), generator=generator)


def test_equal_beginnings_of_paths_become_one() -> None:
    paths = torch.tensor([[[5, 6, 7], [5, 8, 0], [9, 0, 0]]])
    tree = path_trees(paths, torch.tensor([[3, 2, 1]]), 6, 4)
    assert tree.tokens.tolist() == [[5, 9, 6, 8, 7, 5]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 3, 0]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2, 3, 1]]
    assert tree.bits.tolist() == [[1, 3, 5, 11, 19, 43, 65]]
    assert tree.num_drafts is not None and tree.num_drafts.tolist() == [5]


def test_a_path_ends_where_there_is_no_room() -> None:
    paths = torch.tensor([[[5, 6], [7, 8], [9, 1], [7, 2]]])
    tree = path_trees(paths, torch.full((1, 4), 2), 5, 2)
    assert tree.tokens.tolist() == [[5, 7, 6, 8, 2]]  # 9 would be a third child
    assert path_trees(paths, torch.full((1, 4), 2), 3, 2).tokens.tolist() == [[5, 7, 6]]


@on_each_kernel_device
@pytest.mark.parametrize(
    ("max_nodes", "topk", "number", "depth"),
    [(1, 1, 1, 1), (6, 2, 4, 3), (16, 3, 8, 4), (63, 8, 8, 9)],
)
def test_the_kernel_makes_the_references_trees(
    device: str, max_nodes: int, topk: int, number: int, depth: int
) -> None:
    for seed in range(4):
        paths, lens = (each.to(device) for each in random_paths(seed, 3, number, depth))
        found = path_trees(paths, lens, max_nodes, topk)
        expected = path_trees.reference(paths.cpu(), lens.cpu(), max_nodes, topk)
        for name in ("tokens", "parents", "depths", "bits", "num_drafts"):
            assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


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
