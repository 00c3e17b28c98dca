"""Layouts of draft trees: what is derived from parents and paths, and refusals."""

import re

import pytest
import torch

from tests.kernels.tree_layouts import layout_of
from tllm_spec.kernels.drafts.draft_layout import DraftLayout

# Of the worked example: 10 and 11 after the root, 20 after 10, 22 after 11, 30 after 20.
EXAMPLE = layout_of([-1, 0, 0, 1, 2, 3])


def test_a_tree_knows_its_depths_children_and_ancestors() -> None:
    assert EXAMPLE.num_nodes == 6 and EXAMPLE.max_depth == 3 and not EXAMPLE.is_chain
    assert EXAMPLE.depths == (0, 1, 1, 2, 2, 3) and EXAMPLE.ranks == (0, 0, 1, 0, 0, 0)
    assert EXAMPLE.children == ((1, 2), (3,), (4,), (5,), (), ())
    rows = ["".join(str(bits >> column & 1) for column in range(6)) for bits in EXAMPLE.bits]
    assert rows == ["100000", "110000", "101000", "110100", "101010", "110101"]


def test_paths_and_parents_of_one_tree_give_the_same_layout() -> None:
    paths = [[0, 0, 0], [1, 0], [1], [0], [0, 0]]
    assert DraftLayout.from_paths(paths) == EXAMPLE


def test_a_chain_is_a_tree_without_branches() -> None:
    chain = DraftLayout.chain(3)
    assert chain == DraftLayout.from_paths([[0], [0, 0], [0, 0, 0]])
    assert chain.is_chain and chain.bits == (1, 3, 7, 15) and chain.topk == 1
    assert DraftLayout.chain(0).num_nodes == 1 and DraftLayout.chain(0).max_depth == 0


def test_a_path_may_skip_a_sibling_and_keeps_its_rank() -> None:
    layout = DraftLayout.from_paths([[0], [2], [2, 1]])
    assert layout.parents == (-1, 0, 0, 2) and layout.ranks == (0, 0, 2, 1) and layout.topk == 3


def test_bits_of_64_nodes_fit_an_int64() -> None:
    layout = DraftLayout.chain(63)
    assert torch.tensor(layout.bits)[-1] == -1  # all 64 bits
    assert layout.bits[62] == 2**63 - 1


@pytest.mark.parametrize(
    ("paths", "named"),
    [
        ([[0], [0, 1], [0, 1]], "[0, 1] is listed twice"),
        ([[0], [1, 0]], "[1, 0] continues [1], which is not listed"),
        ([[0], []], "[] must have one or more ranks"),
        ([[0], [0, -1]], "[0, -1] must have one or more ranks, from 0 on"),
        ([[rank] for rank in range(64)], "at most 63 drafts, not 64"),
    ],
)
def test_wrong_paths_are_refused_by_name(paths: list[list[int]], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        DraftLayout.from_paths(paths)
