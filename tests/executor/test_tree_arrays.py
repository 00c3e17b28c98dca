"""Trees of many requests, in arrays, against one `HostTree` each."""

import random
from typing import Any

import numpy as np
import pytest

from tllm_spec.executor.speculative.drafting.host_tree import numbers_of, tree_of
from tllm_spec.executor.speculative.drafting.tree_arrays import UNLIMITED, Room, read_trees

NUM_REQUESTS, WIDTH = 40, 64
Proposal = tuple[Any, Any]


def some_paths(rng: random.Random) -> Proposal:
    """Also none, empty ones, equal ones, and ones that begin another; or a chain."""
    vocab_size = rng.choice((1, 2, 5, 100_000))
    if rng.random() < 0.1:
        return rng.choices(range(vocab_size), k=rng.randint(0, 5)), None
    lens = rng.choices(range(6), k=rng.randint(0, 12))
    return [rng.choices(range(vocab_size), k=length) for length in lens], None


def some_parents(rng: random.Random) -> Proposal:
    """In any order; now and then a chain, which needs no parents."""
    length = rng.randint(0, 12)
    tokens = rng.sample(range(1000), length)
    if rng.random() < 0.1:
        return tokens, None
    return tokens, [rng.randint(0, node) for node in range(length)]


@pytest.mark.parametrize(
    ("some", "room"),
    [
        (some_paths, UNLIMITED),
        (some_paths, Room(2, 63)),
        (some_paths, Room(3, 9)),
        (some_paths, Room(64, 1)),
        (some_parents, UNLIMITED),
    ],
)
def test_arrays_hold_the_same_trees(some: Any, room: Room) -> None:
    rng = random.Random(5)
    for _ in range(25):
        proposals = [some(rng) for _ in range(NUM_REQUESTS)]
        limits = [rng.randint(0, 5) for _ in proposals]
        slot_ids = rng.sample(range(99), NUM_REQUESTS)
        padding = [rng.randint(0, 99) for _ in proposals]
        whole = [tree_of(*each, room) for each in proposals]
        trees = [tree.up_to(limit) for tree, limit in zip(whole, limits, strict=True)]
        rows = read_trees(proposals, room)
        assert rows.tree_depths.tolist() == [tree.depth for tree in whole]
        assert rows.counts.tolist() == [len(tree.tokens) for tree in whole]
        rows = rows.up_to(np.array(limits))
        assert rows.drafts == [tree.tokens for tree in trees]
        assert rows.tree_depths.tolist() == [tree.depth for tree in trees]
        expected = numbers_of(trees, slot_ids, WIDTH, padding)
        assert rows.numbers(slot_ids, WIDTH, padding).tolist() == expected.tolist()


def test_the_bits_of_63_drafts_fill_a_signed_number() -> None:
    proposals = [(list(range(63)), None), ([7], None)]
    numbers = read_trees(proposals, UNLIMITED).numbers([3, 4], WIDTH, [1, 2])
    trees = [tree_of(*each, UNLIMITED) for each in proposals]
    assert (
        numbers.tolist() == numbers_of(trees, [3, 4], WIDTH, [1, 2]).tolist() and min(numbers) < -1
    )


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ([[1, "x"]], None),
        ([1, [2]], None),
        ([1.5], None),
        (3, None),
        ([-1], None),
        ([[1 << 64]], None),
        ([[1]] * 65, None),
        ([1] * 65, None),
        ([1, 2], [0, 2]),
        ([1, 2], [0, -1]),
        ([1, 2], [0]),
        ([7, 8, 7], [0, 1, 0]),
        ([[1]], [0]),
    ],
)
def test_what_is_no_tree_is_refused(tokens: Any, parents: Any) -> None:
    proposals = [([4, 5], None if parents is None else [0, 0]), (tokens, parents)]
    with pytest.raises((TypeError, ValueError, OverflowError)):
        read_trees(proposals, UNLIMITED)
