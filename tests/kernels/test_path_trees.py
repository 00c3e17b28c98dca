"""Trees of paths: small examples, and the kernel against the reference."""

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tllm_spec.kernels.drafts.path_trees import path_trees


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
