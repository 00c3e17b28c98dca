"""Accepting paths in slots: a small example, chains, and the kernel against
the reference with every table compared."""

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreter import on_each_kernel_device
from tests.kernels.test_slot_windows import (
    assert_equal,
    emitted,
    moved,
    one_slot,
    random_tables,
)
from tests.kernels.tree_layouts import layout_of
from tllm_spec.kernels.drafts.draft_layout import DraftLayout
from tllm_spec.kernels.slots.accept import DraftTree, SlotTables, SyntheticRates, TreeTables
from tllm_spec.kernels.slots.slot_windows import accept_windows, write_drafts

NUM_SLOTS, ROWS = 17, ("parents", "depths", "bits")


def tables_for(seed: int, width: int) -> SlotTables:
    return random_tables(seed, NUM_SLOTS, width + 2, width)  # slots may have a wider window


def random_parents(seed: int, width: int) -> tuple[torch.Tensor, int]:
    """The parents in each slot's tree, and the depth of the deepest tree."""
    generator = random.Random(seed)
    layouts = [
        layout_of([-1, *(generator.randrange(max(0, node - 5), node) for node in range(1, width))])
        for _ in range(NUM_SLOTS)
    ]
    depth = max(layout.max_depth for layout in layouts)
    return torch.tensor([layout.parents for layout in layouts]), depth


def with_parents(tables: SlotTables, parents: torch.Tensor) -> SlotTables:
    return replace(tables, trees=TreeTables(parents, parents, parents))


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
    tables, expected = (moved(tables_for(1, length + 1), device) for _ in range(2))
    parents = torch.tensor(DraftLayout.chain(length).parents).expand(NUM_SLOTS, -1).to(device)
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
@pytest.mark.parametrize("width", [1, 2, 9, 64])
@pytest.mark.parametrize("synthetic", [False, True])
def test_the_kernel_accepts_and_advances_like_the_reference(
    device: str, width: int, synthetic: bool
) -> None:
    lengths = set()
    for seed in range(3):
        generator = torch.Generator().manual_seed(100 + seed)
        tables, (parents, depth) = tables_for(seed, width), random_parents(seed, width)
        there = moved(tables, device)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[: 5 + 5 * seed]
        targets = torch.randint(-1, 3, (len(slots), width), generator=generator)
        seeds = torch.randint(-(2**63), 2**63 - 1, (NUM_SLOTS, 2), generator=generator)
        bounds = torch.tensor([[0.5, 0.9, 0.95]] * max(depth, 1), dtype=torch.float64)
        rates, rates_there = (
            SyntheticRates(bounds.contiguous().to(where), seeds.to(where)[:, 0])
            if synthetic
            else None
            for where in ("cpu", device)
        )
        kv_lens = tables.kv_lens[slots]
        own, there_own = with_parents(tables, parents), with_parents(there, parents.to(device))
        expected = accept_windows.reference(own, slots, kv_lens, targets, depth, rates)
        given = slots.to(device), kv_lens.to(device), targets.to(device)
        found = accept_windows(there_own, *given, depth, rates_there)
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
        assert_equal(there, tables)
        lengths |= set(expected.lens.tolist())
    assert len(lengths) >= min(width, 3)


@on_each_kernel_device
def test_one_layout_serves_all_slots(device: str) -> None:
    layout = layout_of([-1, 0, 0, 1, 1, 2])
    tables, slots = tables_for(3, 6), torch.arange(NUM_SLOTS)
    there, parents = moved(tables, device), torch.tensor(layout.parents)
    targets = torch.randint(0, 3, (NUM_SLOTS, 6), generator=torch.Generator().manual_seed(4))
    kv_lens = tables.kv_lens.clone()
    own = with_parents(tables, parents.expand(NUM_SLOTS, -1))
    expected = accept_windows.reference(own, slots, kv_lens, targets, 2)
    own = with_parents(there, parents.to(device).expand(NUM_SLOTS, -1))
    found = accept_windows(own, slots.to(device), kv_lens.to(device), targets.to(device), 2)
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert_equal(there, tables)


def tree_of(layout: DraftLayout, batch: int, device: str = "cpu") -> DraftTree:
    tokens = torch.arange(100, 100 + batch * (layout.num_nodes - 1)).view(batch, -1)
    rows = {name: torch.tensor(getattr(layout, name)).repeat(batch, 1).to(device) for name in ROWS}
    return DraftTree(tokens.to(device), **rows)


def empty_trees(width: int, device: str) -> TreeTables:
    return TreeTables(*(torch.full((NUM_SLOTS, width), -7, device=device) for _ in ROWS))


def test_drafts_deeper_than_a_requests_limit_do_not_count() -> None:
    layout = layout_of([-1, 0, 0, 1, 2, 3])
    tables, trees = tables_for(1, 6), empty_trees(8, "cpu")
    slots, limits = torch.tensor([4, 2, 9, 1]), torch.zeros(NUM_SLOTS, dtype=torch.int64)
    limits[slots] = torch.tensor([0, 1, 2, 9])
    roots = tables.window[slots, 0].clone()
    write_drafts(replace(tables, trees=trees), slots, tree_of(layout, 4), limits)
    assert tables.num_drafts[slots].tolist() == [0, 2, 4, 5]
    assert tables.window[2, 1:6].tolist() == [105, 106, 107, 108, 109]
    assert torch.equal(tables.window[slots, 0], roots)
    assert trees.parents[9].tolist() == [-7, 0, 0, 1, 2, 3, -7, -7], "the root's row stays"
    assert trees.depths[9, 1:6].tolist() == list(layout.depths[1:])
    assert trees.bits[9, 1:6].tolist() == list(layout.bits[1:])
    assert (trees.parents[0] == -7).all()


@on_each_kernel_device
@pytest.mark.parametrize("says_number", [False, True])
@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("width", [2, 13, 64])
def test_the_kernel_writes_trees_like_the_reference(
    device: str, width: int, is_expanded: bool, says_number: bool
) -> None:
    tables, generator = tables_for(2, width), random.Random(width)
    there = moved(tables, device)
    paths: list[tuple[int, ...]] = [()]
    while len(paths) < width:
        path = (*generator.choice(paths), generator.randrange(3))
        paths += [] if path in paths else [path]
    layout = DraftLayout.from_paths(paths[1:])
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
