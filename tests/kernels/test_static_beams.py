"""Drafting a static tree step by step, by a draft model that names each candidate by its path."""

import random

import pytest
import torch

from tllm_spec.kernels.drafts.draft_layout import DraftLayout, static_steps

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
