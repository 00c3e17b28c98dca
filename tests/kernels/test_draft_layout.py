"""Drafting a static tree step by step: every node gets the candidate of its path."""

import random

import pytest
import torch

from tllm_spec.kernels.drafts.draft_layout import HostTree, static_steps


def test_a_chain_is_a_tree_without_branches() -> None:
    chain = HostTree.of_paths([[0], [0, 0], [0, 0, 0]])
    assert chain.is_chain and chain.bits == [1, 3, 7, 15] and chain.tokens == [0, 0, 0]


def test_a_path_may_skip_a_sibling_and_keeps_its_rank() -> None:
    tree = HostTree.of_paths([[0], [2], [2, 1]])
    assert tree.parents == [-1, 0, 0, 2] and tree.tokens == [0, 2, 1]


def test_more_drafts_than_there_are_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 63 tokens, not 64"):
        HostTree.of_paths([[rank] for rank in range(64)])


CPU = torch.device("cpu")
BASE = 10  # ranks are digits: the candidate of rank r after path p is p * 10 + r + 1


def random_layout(seed: int, num_drafts: int) -> HostTree:
    generator, paths = random.Random(seed), [()]
    while len(paths) <= num_drafts:
        path = (*generator.choice(paths), generator.randrange(4))
        if path not in paths:
            paths.append(path)
    return HostTree.of_paths(sorted(paths))


def path_token(layout: HostTree, node: int) -> int:
    if node == 0:
        return 0
    return path_token(layout, layout.parents[node]) * BASE + layout.tokens[node - 1] + 1


def ancestors(layout: HostTree, node: int) -> set[int]:
    """The node and the drafts before it."""
    return {node} | ancestors(layout, layout.parents[node]) if node else set()


@pytest.mark.covering
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_drafts", [1, 7, 63])
def test_every_node_gets_the_candidate_of_its_path(seed: int, num_drafts: int) -> None:
    layout = random_layout(seed, num_drafts)
    found, run, topk = [torch.zeros(2, 1, dtype=torch.int64)], [0], 4
    parent_tokens, all_run, steps = found[0], list[int](), static_steps(layout, topk, CPU)
    for step in steps:
        candidates = parent_tokens.unsqueeze(2) * BASE + torch.arange(1, topk + 1)
        tokens = candidates.flatten(1)[:, step.candidates]
        num_before = sum(each.shape[1] for each in found)
        found.append(tokens)
        parents, run = run, (num_before + step.runs).tolist()
        assert [parents[row] for row in step.parent_rows] == [layout.parents[n] for n in run]
        all_run += run
        for node, bits in zip(run, step.bits.tolist(), strict=True):
            seen = {all_run[row] for row in range(len(all_run)) if bits >> row & 1}
            assert seen == ancestors(layout, node)
        parent_tokens = tokens[:, step.runs]
    assert run == [] and len(steps) == layout.depth
    expected = [path_token(layout, node) for node in range(len(layout.parents))]
    assert torch.cat(found, dim=1).tolist() == [expected, expected]
