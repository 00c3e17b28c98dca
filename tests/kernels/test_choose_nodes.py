"""Which nodes of a batch's trees have a row, that they are trees of their own afterwards, what is
learned from a round, and the kernels against their references."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.test_choose_rows import BUDGETS, moved
from tests.kernels.test_slot_windows import assert_equal, random_tables
from tests.kernels.test_slot_windows import moved as tables_on
from tests.kernels.tree_problem import bits_of, random_paths
from tllm_spec.kernels.slots.accept import SlotTables, TreeTables
from tllm_spec.kernels.slots.choose_nodes import choose_nodes, learn_nodes
from tllm_spec.kernels.slots.choose_rows import (
    EXPECTED_SCALE,
    NUM_PROBABILITIES,
    OFFERED_ROUNDS,
    ChosenRows,
    DraftValues,
    features_of,
)

NUM_SLOTS = 9
TREE_BUDGETS = ((1, 2.0, 1), (1, 2.5, 2), (3, 4.0, 1), (3, 4.0, 2), (9, 64.0, 2))


class Trees:
    """Random trees of W rows in the windows of slots, whose tokens are all different."""

    def __init__(
        self, width: int, seed: int = 0, budgets: Sequence[tuple[int, float, int]] = ()
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.width, self.slots = width, torch.tensor([3, 0, 8, 5, 7])
        paths = [random_paths(width - 1, generator) for _ in range(NUM_SLOTS)]
        own = [[[0], *([0, *(key + 1 for key in path)] for path in each)] for each in paths]
        parents = [[-1, *(path[-2] for path in each[1:])] for each in own]
        depths = [[len(path) - 1 for path in each] for each in own]
        self.depth = max(map(max, depths))
        rows = parents, depths, [bits_of(each) for each in own], [[0] * width] * NUM_SLOTS
        self.trees = TreeTables(*(torch.tensor(each) for each in rows))
        self.tables = random_tables(seed, NUM_SLOTS, width, width)
        tokens = torch.arange(NUM_SLOTS * width).view(NUM_SLOTS, width)
        num_drafts = torch.randint(0, width, (NUM_SLOTS,), generator=generator)
        self.tables = replace(self.tables, window=tokens, num_drafts=num_drafts)
        self.probs = torch.rand(NUM_SLOTS, width - 1, generator=generator)
        self.values = DraftValues.of_slots(NUM_SLOTS, width - 1, torch.device("cpu"), budgets)
        self.values.features.copy_(features_of(self.probs))
        self.values.of_feature[:NUM_PROBABILITIES] *= 2  # believed wholly
        self.values.of_slot.copy_(torch.randn(NUM_SLOTS, generator=generator))
        self.values.num_idle.copy_(torch.randint(0, 33, (NUM_SLOTS,), generator=generator))

    def choose(self, num_rows: int) -> ChosenRows:
        window = self.tables, self.trees, self.slots, self.width, self.depth, num_rows
        return choose_nodes.reference(self.values, *window)

    def tokens_of(self, slot: int, number: int) -> set[tuple[int, ...]]:
        """The tokens on the path to each of a slot's first nodes, by their parents."""
        tokens = self.tables.window[slot].tolist()
        paths = [[tokens[0]]]
        for row, parent in enumerate(self.trees.parents[slot].tolist()[1 : number + 1], 1):
            assert 0 <= parent < row
            paths.append([*paths[parent], tokens[row]])
        return set(map(tuple, paths))


def test_the_likeliest_paths_of_all_requests_have_the_rows() -> None:
    own = Trees(5)
    parents = torch.tensor([-1, 0, 0, 1, 2]).repeat(NUM_SLOTS, 1)
    trees = replace(own.trees, parents=parents, depths=torch.tensor([0, 1, 1, 2, 2]).repeat(9, 1))
    trees.bits.copy_(torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101]))
    probs = torch.zeros(NUM_SLOTS, 4)
    probs[0], probs[1] = torch.tensor([0.3, 0.6, 0.9, 0.7]), torch.tensor([0.5, 0.2, 0.2, 0.2])
    values = DraftValues.of_slots(NUM_SLOTS, 4, torch.device("cpu"))
    values.features.copy_(features_of(probs))
    values.of_feature[:NUM_PROBABILITIES] *= 2
    tables, slots = own.tables, torch.arange(2)
    tables.num_drafts.fill_(4)
    chosen = choose_nodes(values, tables, trees, slots, 5, 2, 5)
    assert chosen.offsets.tolist() == [0, 3, 5] and chosen.num_verified.tolist() == [2, 1]
    assert trees.order[0].tolist() == [0, 2, 4, 1, 3] and trees.order[1].tolist() == [0, 1, 2, 3, 4]
    assert tables.window[0].tolist() == [0, 2, 4, 1, 3]
    assert trees.parents[0].tolist() == [-1, 0, 1, 0, 3]
    assert trees.depths[0].tolist() == [0, 1, 2, 1, 2]
    assert trees.bits[0].tolist() == [0b1, 0b11, 0b111, 0b1001, 0b11001]
    assert values.features[0].tolist() == features_of(probs[0][[1, 3, 0, 2]]).tolist()


def test_of_a_tree_is_said_what_its_first_children_and_its_best_nodes_would_bring() -> None:
    """The second of two children of the root is the likelier one, and has two children."""
    budgets = ((1, 2.0, 1), (2, 3.0, 1), (1, 3.0, 2), (2, 2.0, 2), (2, 4.0, 2))
    own = Trees(6, budgets=budgets)
    parents = torch.tensor([-1, 0, 0, 1, 2, 2]).repeat(NUM_SLOTS, 1)
    depths = torch.tensor([0, 1, 1, 2, 2, 2]).repeat(NUM_SLOTS, 1)
    trees = replace(own.trees, parents=parents, depths=depths)
    own.values.features.copy_(features_of(torch.tensor([0.3, 0.6, 0.9, 0.7, 0.2])))
    own.values.of_slot.fill_(0)
    own.tables.num_drafts.fill_(5)
    own.values.num_idle.fill_(OFFERED_ROUNDS)  # a row that is due says nothing
    chances = own.values.of_feature[own.values.features[0].long()].sigmoid()
    first, second, third, fourth, _ = chances.tolist()
    third, fourth = first * third, second * fourth
    chosen = choose_nodes(own.values, own.tables, trees, torch.arange(2), 6, 2, 6)
    expected = [first, first + third, first + second, second, second + fourth + first]
    for found in (chosen.expected / EXPECTED_SCALE).tolist():
        assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("width", [2, 9, 64])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_the_chosen_nodes_are_a_part_of_the_tree_that_is_a_tree(width: int, share: float) -> None:
    own = Trees(width, seed=width)
    before = [own.tokens_of(slot, width - 1) for slot in range(NUM_SLOTS)]
    numbers = own.tables.num_drafts.clone()
    num_rows = len(own.slots) + round(share * int(numbers[own.slots].sum()))
    chosen = own.choose(num_rows)
    assert chosen.offsets[-1] == num_rows
    for slot, number in zip(own.slots.tolist(), chosen.num_verified.tolist(), strict=True):
        found = own.tokens_of(slot, number)
        assert len(found) == number + 1 and found <= before[slot]
        assert own.tokens_of(slot, width - 1) == before[slot]
        bits = own.trees.bits[slot].tolist()
        tokens = own.tables.window[slot].tolist()
        paths = {tuple(tokens[i] for i in range(width) if bit >> i & 1) for bit in bits}
        assert paths == before[slot]
    assert (chosen.num_verified <= numbers[own.slots]).all()
    if share == 1.0:
        assert torch.equal(chosen.num_verified, numbers[own.slots])


def test_all_children_of_accepted_nodes_say_something() -> None:
    values = DraftValues.of_slots(1, 5, torch.device("cpu"), BUDGETS)
    values.features.copy_(torch.arange(5))
    before, slots = values.of_feature.clone(), torch.tensor([0])
    parents = torch.tensor([[-1, 0, 0, 2, 2, 1]])
    learn_nodes(values, parents, torch.tensor([4]), slots, torch.tensor([[0, 2, 2]]))
    change = (values.of_feature - before)[:5]
    assert change[1] > 0 and change[[0, 2, 3]].max() < 0 and change[4] == 0
    assert values.num_idle.tolist() == [0]


def test_a_slot_without_verified_nodes_has_one_now_and_then() -> None:
    own = Trees(4)
    own.tables.num_drafts.fill_(3)
    own.values.of_slot.fill_(0)
    own.values.of_slot[8] = -20
    own.values.num_idle.fill_(0)
    own.values.num_idle[8] = OFFERED_ROUNDS - 2
    index = own.slots.tolist().index(8)
    assert own.choose(10).num_verified[index] == 0
    own.values.num_idle[8] += 1
    assert own.choose(10).num_verified[index] == 1


@on_each_kernel_device
@pytest.mark.parametrize("width", [9, 2, 64])
@pytest.mark.parametrize("budgets", [TREE_BUDGETS, ()], ids=["budgets", ""])
def test_the_kernels_choose_like_the_references(
    device: str, width: int, budgets: Sequence[tuple[int, float, int]]
) -> None:
    for seed, share in enumerate((0.0, 0.3, 1.0)):
        own = Trees(width, seed, budgets)
        there = moved(own.values, device), tables_on(own.tables, device)
        trees = TreeTables(*(each.to(device, copy=True) for each in vars(own.trees).values()))
        num_rows = len(own.slots) + round(share * len(own.slots) * (width - 1))
        expected = own.choose(num_rows)
        rest = trees, own.slots.to(device), width, own.depth, num_rows
        found = choose_nodes(*there, *rest)
        assert found.offsets.tolist() == expected.offsets.tolist()
        assert found.num_verified.tolist() == expected.num_verified.tolist()
        assert found.expected.shape == expected.expected.shape == (len(own.slots), len(budgets))
        assert ((found.expected.cpu() - expected.expected).abs() <= 1).all()
        assert_same(there, trees, own)


def assert_same(there: tuple[DraftValues, SlotTables], trees: TreeTables, own: Trees) -> None:
    values, tables = there
    assert_equal(tables, own.tables)
    for name, expected in vars(own.trees).items():
        assert torch.equal(getattr(trees, name).cpu(), expected), name
    assert torch.equal(values.features.cpu(), own.values.features)


@on_each_kernel_device
def test_the_kernel_learns_like_the_reference(device: str) -> None:
    own, generator = Trees(9), torch.Generator().manual_seed(3)
    there = moved(own.values, device)
    for _ in range(5):
        ends = torch.randint(0, 9, (len(own.slots),), generator=generator)
        bits = own.trees.bits[own.slots, ends].tolist()
        paths = [[node for node in range(9) if bit >> node & 1] for bit in bits]
        rows = torch.tensor([path + path[-1:] * (9 - len(path)) for path in paths])
        num_verified = own.tables.num_drafts[own.slots]
        learn_nodes.reference(own.values, own.trees.parents, num_verified, own.slots, rows)
        given = own.trees.parents, num_verified, own.slots, rows
        learn_nodes(there, *(each.to(device) for each in given))
    for name, expected in vars(own.values).items():
        torch.testing.assert_close(getattr(there, name).cpu(), expected, msg=name)
