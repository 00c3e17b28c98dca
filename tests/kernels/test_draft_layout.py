"""Layouts of draft trees: what is derived from parents and paths, refusals, and drafting a static
tree step by step."""

import random
import re

import pytest
import torch

from tests.kernels.tree_layouts import layout_of
from tllm_spec.kernels.drafts.draft_layout import DraftLayout, static_steps

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


BASE = 10  # ranks are digits: the candidate of rank r after path p is p * 10 + r + 1


def random_layout(seed: int, num_drafts: int) -> DraftLayout:
    generator, paths = random.Random(seed), [()]
    while len(paths) <= num_drafts:
        path = (*generator.choice(paths), generator.randrange(4))
        if path not in paths:
            paths.append(path)
    return DraftLayout.from_paths(paths[1:])


def path_token(layout: DraftLayout, node: int) -> int:
    if node == 0:
        return 0
    return path_token(layout, layout.parents[node]) * BASE + layout.ranks[node] + 1


def ancestors(layout: DraftLayout, node: int) -> set[int]:
    """The node and the drafts before it."""
    return {node} | ancestors(layout, layout.parents[node]) if node else set()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_drafts", [1, 7, 63])
def test_every_node_gets_the_candidate_of_its_path(seed: int, num_drafts: int) -> None:
    layout = random_layout(seed, num_drafts)
    found, run = torch.zeros(2, layout.num_nodes, dtype=torch.int64), [0]
    parent_tokens, all_run = torch.zeros(2, 1, dtype=torch.int64), list[int]()
    for step in static_steps(layout, torch.device("cpu")):
        candidates = parent_tokens.unsqueeze(2) * BASE + torch.arange(1, layout.topk + 1)
        tokens = step.take(candidates)
        found[:, step.nodes] = tokens
        parents, run = run, step.nodes[step.runs].tolist()
        assert [parents[row] for row in step.parent_rows] == [layout.parents[n] for n in run]
        all_run += run
        for node, bits in zip(run, step.bits.tolist(), strict=True):
            seen = {all_run[row] for row in range(len(all_run)) if bits >> row & 1}
            assert seen == ancestors(layout, node)
        parent_tokens = tokens[:, step.runs]
    assert run == [] and len(static_steps(layout, torch.device("cpu"))) == layout.max_depth
    expected = [path_token(layout, node) for node in range(layout.num_nodes)]
    assert found.tolist() == [expected, expected]
