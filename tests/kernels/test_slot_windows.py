"""Accepting and writing drafts in slots, chains and trees: small examples, and the kernels against
their references with every table compared."""

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.tree_layouts import chain_layout, layout_of
from tllm_spec.kernels.drafts.draft_layout import HostTree
from tllm_spec.kernels.slots.accept import (
    Accepted,
    Drafts,
    DraftTree,
    SlotTables,
    SyntheticRates,
    TreeTables,
)
from tllm_spec.kernels.slots.slot_windows import accept_windows, write_drafts

NUM_SLOTS, MAX_DRAFT_LEN = 23, 6
ROWS = ("parents", "depths", "bits")
# Rows of a window, and whether they are a tree's.
ACCEPTED = [(9, True), (4, False), (1, True), (1, False), (2, True), (2, False), (7, False)]
ACCEPTED += [(64, True)]
NAMES = ("kv_lens", "window", "num_drafts", "previous_token")


def random_tables(seed: int, width: int = MAX_DRAFT_LEN + 1) -> SlotTables:
    """width: of a round; slots may have a wider window and more drafts."""
    generator = torch.Generator().manual_seed(seed)

    def integers(upper: int, *size: int) -> torch.Tensor:
        return torch.randint(0, upper, size, generator=generator)

    return SlotTables(
        integers(5000, NUM_SLOTS),
        integers(3, NUM_SLOTS, width + 2),
        integers(width + 1, NUM_SLOTS),
        integers(3, NUM_SLOTS),
    )


def moved(tables: SlotTables, device: str) -> SlotTables:
    """A copy on the device, without trees."""
    return SlotTables(*(getattr(tables, name).clone().to(device) for name in NAMES))


def assert_equal(found: SlotTables, expected: SlotTables) -> None:
    for name in NAMES:
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name)), name


def emitted(accepted: Accepted) -> list[list[int]]:
    """The tokens that count."""
    rows = zip(accepted.tokens.tolist(), accepted.lens.tolist(), strict=True)
    return [tokens[:number] for tokens, number in rows]


def one_slot(window: list[int], num_drafts: int) -> SlotTables:
    return SlotTables(
        torch.tensor([10]), torch.tensor([window]), torch.tensor([num_drafts]), torch.tensor([99])
    )


def random_parents(seed: int, width: int) -> tuple[torch.Tensor, int]:
    """The parents in each slot's tree, and the depth of the deepest tree."""
    generator = random.Random(seed)
    layouts = [
        layout_of([-1, *(generator.randrange(max(0, node - 5), node) for node in range(1, width))])
        for _ in range(NUM_SLOTS)
    ]
    depth = max(layout.depth for layout in layouts)
    return torch.tensor([layout.parents for layout in layouts]), depth


def with_parents(tables: SlotTables, parents: torch.Tensor) -> SlotTables:
    return replace(tables, trees=TreeTables(parents, parents, parents))


@pytest.mark.parametrize(
    ("num_drafts", "targets", "num_new", "window", "previous"),
    [
        (3, [1, 2, 3, 4], 4, 4, 3),
        (3, [1, 2, 9, 4], 3, 9, 2),
        (3, [7, 2, 3, 4], 1, 7, 5),  # 5 is the bonus token
        (1, [1, 2, 3, 4], 2, 2, 1),
        (0, [1, 2, 3, 4], 1, 1, 5),
        (3, [-1, 2, 3, 4], 1, 0, 5),  # no valid token: 0, which the embedding has
        (3, [1, 2], 2, 2, 1),  # fewer drafts are verified than the slot has
    ],
)
def test_a_slot_advances_by_the_accepted_tokens(
    num_drafts: int, targets: list[int], num_new: int, window: int, previous: int
) -> None:
    tables = one_slot([5, 1, 2, 3], num_drafts)
    slots = torch.tensor([0])
    found = accept_windows(tables, slots, tables.kv_lens.clone(), torch.tensor([targets]))
    assert emitted(found) == [targets[:num_new]] and found.rows is None
    assert tables.kv_lens.tolist() == [10 + num_new] and tables.num_drafts.tolist() == [0]
    assert tables.window.tolist() == [[window, 1, 2, 3]] and tables.previous_token.tolist() == [
        previous
    ]


def test_drafts_beyond_a_requests_limit_do_not_count() -> None:
    tables = one_slot([5, 0, 0, 0], 0)
    write_drafts(tables, torch.tensor([0]), Drafts(torch.tensor([[7, 8]])), torch.tensor([1]))
    assert tables.window.tolist() == [[5, 7, 8, 0]] and tables.num_drafts.tolist() == [1]
    fewer = Drafts(torch.tensor([[7, 8]]), torch.tensor([0]))  # than the request's limit
    write_drafts(tables, torch.tensor([0]), fewer, torch.tensor([1]))
    assert tables.num_drafts.tolist() == [0]


@on_each_kernel_device
@pytest.mark.parametrize(("width", "in_tree"), ACCEPTED)
@pytest.mark.parametrize("synthetic", [False, True])
def test_the_kernel_accepts_and_advances_like_the_reference(
    device: str, width: int, in_tree: bool, synthetic: bool
) -> None:
    lengths = set()
    for seed in range(4):
        tables, generator = random_tables(seed, width), torch.Generator().manual_seed(100 + seed)
        own, there = tables, moved(tables, device)
        own_there, depth, bounds = there, None, [[rate] for rate in (0.9, 0.9, 0.6, 1.0, 0.4, 0.5)]
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: 5 + 4 * seed]
        targets = torch.randint(-1, 3, (len(slots), width), generator=generator)
        if in_tree:
            parents, depth = random_parents(seed, width)
            own = with_parents(tables, parents)
            own_there, bounds = with_parents(there, parents.to(device)), [[0.5, 0.9, 0.95]] * 64
        else:
            agree = torch.rand(len(slots), width - 1, generator=generator) < 0.7
            drafts, others = tables.window[slots, 1:width], targets[:, : width - 1]
            targets[:, : width - 1] = torch.where(agree, drafts, others)
        seeds = torch.randint(-(2**63), 2**63 - 1, (NUM_SLOTS, 2), generator=generator)
        chance = torch.tensor(bounds, dtype=torch.float64)
        rates, rates_there = (
            SyntheticRates(chance.to(where), seeds.to(where)[:, 0]) if synthetic else None
            for where in ("cpu", device)
        )
        kv_lens = tables.kv_lens[slots]
        expected = accept_windows.reference(own, slots, kv_lens, targets, depth, rates)
        given = slots.to(device), kv_lens.to(device), targets.to(device)
        found = accept_windows(own_there, *given, depth, rates_there)
        assert emitted(found) == emitted(expected) and (found.rows is None) == (not in_tree)
        if in_tree:
            assert [each.tolist() for each in found] == [each.tolist() for each in expected]
        assert_equal(there, tables)
        lengths |= set(expected.lens.tolist())
    assert len(lengths) >= min(width, 3)


@on_each_kernel_device
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_the_kernel_writes_drafts_like_the_reference(
    device: str, length: int, counted: bool
) -> None:
    tables, generator = random_tables(1), torch.Generator().manual_seed(2)
    there = moved(tables, device)
    slots = torch.randperm(NUM_SLOTS, generator=generator)[:9]
    drafts = torch.randint(0, 1000, (length, 9), generator=generator).T  # strided
    limits = torch.randint(0, 7, (NUM_SLOTS,), generator=generator)
    numbers = torch.randint(0, length + 1, (9,), generator=generator) if counted else None
    write_drafts.reference(tables, slots, Drafts(drafts, numbers), limits)
    own = Drafts(drafts.to(device), None if numbers is None else numbers.to(device))
    write_drafts(there, slots.to(device), own, limits.to(device))
    assert_equal(there, tables)


@on_each_kernel_device
def test_duplicate_padding_slots_do_not_change_other_slots(device: str) -> None:
    tables = random_tables(5)
    there = moved(tables, device)
    slots = torch.tensor([3, 22, 22, 22, 8])
    targets = torch.randint(0, 3, (5, 4), generator=torch.Generator().manual_seed(6))
    kv_lens = tables.kv_lens[slots]
    accept_windows.reference(tables, slots, kv_lens, targets)
    accept_windows(there, slots.to(device), kv_lens.to(device), targets.to(device))
    for name in NAMES:
        found, expected = getattr(there, name).cpu(), getattr(tables, name)
        assert torch.equal(found[:22], expected[:22]), name
    assert int(kv_lens[1]) < there.kv_lens[22] <= int(kv_lens[1]) + 4


@pytest.mark.parametrize(
    ("num_drafts", "targets", "rows", "new_tokens", "window", "previous"),
    [
        (5, [11, 55, 22, 55, 77, 55], [0, 2, 4, 4], [11, 22, 77, 77], 77, 22),
        (3, [11, 55, 22, 55, 77, 55], [0, 2, 2, 2], [11, 22, 22, 22], 22, 11),
        (0, [11, 55, 22, 55, 77, 55], [0, 0, 0, 0], [11, 11, 11, 11], 11, 99),
        (5, [10, 20, 22, 30, 77, -1], [0, 1, 3, 5], [10, 20, 30, -1], 0, 30),
    ],
)
def test_a_slot_advances_along_the_accepted_path(
    num_drafts: int,
    targets: list[int],
    rows: list[int],
    new_tokens: list[int],
    window: int,
    previous: int,
) -> None:
    tables = one_slot([99, 10, 11, 20, 22, 30], num_drafts)
    parents, slots = torch.tensor([[-1, 0, 0, 1, 2, 3]]), torch.tensor([0])
    kv_lens = tables.kv_lens.clone()
    own = with_parents(tables, parents)
    found = accept_windows(own, slots, kv_lens, torch.tensor([targets]), 3)
    number = len(set(rows))
    assert [each.tolist() for each in found] == [[new_tokens], [number], [rows]]
    assert tables.kv_lens.tolist() == [10 + number] and tables.num_drafts.tolist() == [0]
    assert tables.window[0, 0] == window and tables.previous_token.tolist() == [previous]


@on_each_kernel_device
@pytest.mark.parametrize("synthetic", [False, True])
def test_chains_are_accepted_and_advance_like_trees_with_one_child(
    device: str, synthetic: bool
) -> None:
    length, slots = 4, torch.arange(NUM_SLOTS, device=device)
    tables, expected = (moved(random_tables(1, length + 1), device) for _ in range(2))
    parents = torch.tensor(chain_layout(length).parents).expand(NUM_SLOTS, -1).to(device)
    targets = tables.window[:, 1 : length + 2].clone()
    targets[::3, 1] += 1
    rates = torch.tensor([0.9, 0.6, 1.0, 0.8], dtype=torch.float64, device=device)[:, None]
    chance = SyntheticRates(rates, slots) if synthetic else None
    own = slots, tables.kv_lens.clone(), targets
    tree = accept_windows(with_parents(tables, parents), *own, length, chance)
    chain = accept_windows(expected, *own, None, chance)
    assert emitted(tree) == emitted(chain) and len(set(chain.lens.tolist())) > 2
    assert_equal(tables, moved(expected, "cpu"))


@on_each_kernel_device
def test_one_layout_serves_all_slots(device: str) -> None:
    layout = layout_of([-1, 0, 0, 1, 1, 2])
    tables, slots = random_tables(3, 6), torch.arange(NUM_SLOTS)
    there, parents = moved(tables, device), torch.tensor(layout.parents)
    targets = torch.randint(0, 3, (NUM_SLOTS, 6), generator=torch.Generator().manual_seed(4))
    kv_lens = tables.kv_lens.clone()
    own = with_parents(tables, parents.expand(NUM_SLOTS, -1))
    expected = accept_windows.reference(own, slots, kv_lens, targets, 2)
    own = with_parents(there, parents.to(device).expand(NUM_SLOTS, -1))
    found = accept_windows(own, slots.to(device), kv_lens.to(device), targets.to(device), 2)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert_equal(there, tables)


def tree_of(layout: HostTree, batch: int, device: str = "cpu") -> DraftTree:
    tokens = torch.arange(100, 100 + batch * (len(layout.tokens))).view(batch, -1)
    rows = {name: torch.tensor(getattr(layout, name)).repeat(batch, 1).to(device) for name in ROWS}
    return DraftTree(tokens.to(device), **rows)


def empty_trees(width: int, device: str) -> TreeTables:
    return TreeTables(*(torch.full((NUM_SLOTS, width), -7, device=device) for _ in ROWS))


def test_drafts_deeper_than_a_requests_limit_do_not_count() -> None:
    layout = layout_of([-1, 0, 0, 1, 2, 3])
    tables, trees = random_tables(1, 6), empty_trees(8, "cpu")
    slots, limits = torch.tensor([4, 2, 9, 1]), torch.zeros(NUM_SLOTS, dtype=torch.int64)
    limits[slots] = torch.tensor([0, 1, 2, 9])
    roots = tables.window[slots, 0].clone()
    write_drafts(replace(tables, trees=trees), slots, tree_of(layout, 4), limits)
    assert tables.num_drafts[slots].tolist() == [0, 2, 4, 5]
    assert tables.window[2, 1:6].tolist() == [105, 106, 107, 108, 109]
    assert torch.equal(tables.window[slots, 0], roots)
    assert trees.parents[9].tolist() == [-7, 0, 0, 1, 2, 3, -7, -7], "the root's row stays"
    assert trees.depths[9, 1:6].tolist() == layout.depths[1:]
    assert trees.bits[9, 1:6].tolist() == layout.bits[1:]
    assert (trees.parents[0] == -7).all()


@on_each_kernel_device
@pytest.mark.parametrize("says_number", [False, True])
@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("width", [2, 13, 64])
def test_the_kernel_writes_trees_like_the_reference(
    device: str, width: int, is_expanded: bool, says_number: bool
) -> None:
    tables, generator = random_tables(2, width), random.Random(width)
    there = moved(tables, device)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < width:
        path = (*generator.choice(paths), generator.randrange(3))
        paths += [] if path in paths else [path]
    layout = HostTree.of_paths(paths)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(1))[:9]
    limits = torch.arange(NUM_SLOTS) % 4
    trees, trees_there = empty_trees(width + 1, "cpu"), empty_trees(width + 1, device)
    number = torch.arange(9) % width if says_number else None
    expected_tree = replace(tree_of(layout, 9), num_drafts=number)
    write_drafts.reference(replace(tables, trees=trees), slots, expected_tree, limits)
    tree = tree_of(layout, 9, device)
    if is_expanded:
        rows = {name: getattr(tree, name)[:1].expand(9, -1) for name in ROWS}
        tree = DraftTree(tree.tokens, **rows)
    if number is not None:
        tree = replace(tree, num_drafts=number.to(device))
        assert (tables.num_drafts[slots] <= number).all()
    own = replace(there, trees=trees_there)
    write_drafts(own, slots.to(device), tree, limits.to(device))
    assert_equal(there, tables)
    for found, expected in zip(vars(trees_there).values(), vars(trees).values(), strict=True):
        assert torch.equal(found.cpu(), expected)
