"""Acceptance along a path: the worked example, chains against a loop, random trees against a walk
in plain Python, and synthetic acceptance."""

import random

import pytest
import torch

from tests.kernels.tree_layouts import chain_layout, layout_of
from tllm_spec.kernels.drafts.draft_layout import HostTree
from tllm_spec.kernels.slots.accept import accept_by_rates, accept_path


def parents_of(layout: HostTree, batch: int) -> torch.Tensor:
    return torch.tensor(layout.parents).expand(batch, -1)


def random_layout(generator: random.Random, num_nodes: int) -> HostTree:
    return layout_of(
        [-1, *(generator.randrange(max(0, node - 6), node) for node in range(1, num_nodes))]
    )


def walk(layout: HostTree, targets: list[int], tokens: list[int], valid: int) -> list[int]:
    """The accepted rows."""
    rows = [0]
    while True:
        equal = [
            child
            for child, parent in enumerate(layout.parents)
            if parent == rows[-1] and child <= valid and tokens[child] == targets[rows[-1]]
        ]
        if not equal:
            return rows
        rows.append(equal[0])


def test_the_worked_example() -> None:
    layout = layout_of([-1, 0, 0, 1, 2, 3])
    tokens = torch.tensor([[99, 10, 11, 20, 22, 30]])
    targets = torch.tensor([[11, 55, 22, 55, 77, 55]])
    new_tokens, lens, rows = accept_path(targets, tokens, parents_of(layout, 1), 3)
    assert rows.tolist() == [[0, 2, 4, 4]] and lens.tolist() == [3]
    assert new_tokens.tolist() == [[11, 22, 77, 77]]


@pytest.mark.covering
@pytest.mark.parametrize("num_nodes", [1, 2, 8, 33, 64])
@pytest.mark.parametrize("seed", range(3))
def test_random_trees_are_walked_from_the_root(num_nodes: int, seed: int) -> None:
    generator, batch = random.Random(seed), 9
    layout = random_layout(generator, num_nodes)
    tokens = torch.tensor(
        [[generator.randrange(3) for _ in range(num_nodes)] for _ in range(batch)]
    )
    targets = torch.tensor(
        [[generator.randrange(-1, 3) for _ in range(num_nodes)] for _ in range(batch)]
    )
    valid = torch.tensor([generator.choice((0, num_nodes // 2, 99)) for _ in range(batch)])
    found = accept_path(targets, tokens, parents_of(layout, batch), layout.depth, valid)
    for row in range(batch):
        path = walk(layout, targets[row].tolist(), tokens[row].tolist(), int(valid[row]))
        padded = path + path[-1:] * (layout.depth + 1 - len(path))
        assert found.rows is not None
        assert found.rows[row].tolist() == padded and found.lens[row] == len(path)
        assert found.tokens[row].tolist() == [int(targets[row, node]) for node in padded]


@pytest.mark.parametrize("length", [0, 1, 4])
def test_a_chain_is_a_tree_with_one_child(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 2, (64, length + 1), generator=generator)
    targets = torch.randint(-1, 2, (64, length + 1), generator=generator)
    num_drafts = torch.randint(0, length + 2, (64,), generator=generator)
    parents = parents_of(chain_layout(length), 64)
    for number in (num_drafts, None):
        tree, chain = (accept_path(targets, tokens, own, length, number) for own in (parents, None))
        assert [each.tolist() for each in chain] == [each.tolist() for each in tree]
        for count, row in enumerate(zip(targets, tokens, chain.lens, strict=True)):
            most = length if number is None else min(int(number[count]), length)
            assert row[2] == accepted_by_loop(row[0].tolist(), row[1][1:].tolist(), most)


def accepted_by_loop(targets: list[int], drafts: list[int], num_drafts: int) -> int:
    count = 0
    while count < num_drafts and targets[count] == drafts[count]:
        count += 1
    return count + 1


def test_a_target_of_no_number_ends_the_path_and_is_emitted() -> None:
    layout = layout_of([-1, 0, 0, 2])
    targets = torch.tensor([[6, 1, -1, 1], [-1, 1, 1, 1]])
    tokens = torch.tensor([[9, 5, 6, 7], [9, 5, 6, 7]])
    new_tokens, lens, rows = accept_path(targets, tokens, parents_of(layout, 2), 2)
    assert lens.tolist() == [2, 1] and new_tokens.tolist() == [[6, -1, -1], [-1, -1, -1]]
    assert rows.tolist() == [[0, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize("length", [1, 4])
def test_synthetic_acceptance_of_a_chain_is_that_of_a_tree_with_one_child(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(0, 99, (500, length + 1), generator=generator)
    targets = torch.randint(0, 99, (500, length + 1), generator=generator)
    num_drafts = torch.randint(0, length + 1, (500,), generator=generator)
    coins = torch.rand(500, generator=generator, dtype=torch.float64)
    rates = torch.tensor([[0.8], [0.7], [0.5], [0.9]], dtype=torch.float64)
    parents = parents_of(chain_layout(length), 500)
    tree, chain = (
        accept_by_rates(targets, tokens, own, length, num_drafts, rates, coins)
        for own in (parents, None)
    )
    assert [each.tolist() for each in chain] == [each.tolist() for each in tree]
    wins = (coins.unsqueeze(1) < rates[:length, 0].cumprod(0)).sum(1)
    assert torch.equal(chain.lens, 1 + torch.minimum(wins, num_drafts))
    assert len(set(chain.lens.tolist())) == length + 1


def test_synthetic_paths_have_the_frequencies_of_their_rates() -> None:
    layout, number = layout_of([-1, 0, 0, 1, 2, 2, 5]), 40_000
    rates = torch.tensor([[0.5, 0.3, 0.1], [0.4, 0.2, 0.0], [0.6, 0.0, 0.0]], dtype=torch.float64)
    coins = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    tokens = torch.arange(100, 107).expand(number, 7)
    targets = torch.arange(200, 207).expand(number, 7)
    new_tokens, lens, rows = accept_by_rates(
        targets, tokens, parents_of(layout, number), 3, None, rates.cumsum(1), coins
    )
    ends = rows[:, -1]
    # The third child of the root does not exist: that share of the paths ends there.
    shares = {0: 0.2, 1: 0.5 * 0.6, 2: 0.3 * 0.4, 3: 0.5 * 0.4, 4: 0.3 * 0.4, 5: 0.3 * 0.2 * 0.4,
              6: 0.3 * 0.2 * 0.6}  # fmt: skip
    for node, share in shares.items():
        assert abs((ends == node).double().mean() - share) < 1e-3, node
    path = torch.tensor([0, 2, 5, 6])
    longest = new_tokens[ends == 6]
    assert longest.tolist() == [[102, 105, 106, 206]] * len(longest)
    assert (rows[ends == 6] == path).all() and (lens[ends == 6] == 4).all()
