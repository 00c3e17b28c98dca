"""The radix tree alone: matching, the closest partial child, insertion rules, eviction order."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tllm_spec.executor.resources.radix import Key, Node, RadixTree


def add_path(tree: RadixTree, *keys: tuple[int, ...], first_page: int) -> list[Node]:
    """Inserts a path page by page and leaves it held, as a sequence that stores its tokens does."""
    path: list[Node] = []
    for page, key in enumerate(keys, start=first_page):
        node, _ = insert(tree, path[-1] if path else tree.root, key, page)
        hold(tree, [node])
        path.append(node)
    return path


def insert(
    tree: RadixTree, parent: Node, key: tuple[int, ...], page: int
) -> tuple[Node, int | None]:
    """The node, and the page to free if there is one."""
    node, [left_over] = tree.insert(parent, key, [page])
    return node, left_over or None


def hold(tree: RadixTree, nodes: list[Node]) -> None:
    tree.hold(nodes, [0])


def release(tree: RadixTree, path: list[Node]) -> None:
    tree.release(path, [0])


def pages_of(nodes: list[Node]) -> list[int]:
    return [page for node in nodes for page in node.pages]


def evict_all(tree: RadixTree) -> list[int]:
    return [page for _ in range(tree.num_evictable()) for page in tree.evict()]


@pytest.mark.parametrize(
    ("lookahead", "tokens", "limit", "pages"),
    [
        (0, [1, 2, 3, 4, 5, 6], 6, [10, 11, 12]),
        (0, [1, 2, 3, 4, 5, 6], 5, [10, 11]),
        (0, [1, 2, 9, 4, 5, 6], 6, [10]),
        (0, [3, 4], 2, []),
        (0, [1], 1, []),
        (0, [], 0, []),
        (1, [1, 2, 3, 4, 5], 4, [10, 11]),
        (1, [1, 2, 3, 4, 5], 3, [10]),
        (1, [1, 2, 3, 4, 6], 4, [10]),
        (1, [1, 2, 4, 4, 5], 4, []),
        (1, [1, 2], 1, []),
    ],
)
def test_a_match_is_the_longest_cached_run_of_full_pages_with_the_token_after_each(
    lookahead: int, tokens: list[int], limit: int, pages: list[int]
) -> None:
    """The token after a page counts with a lookahead only."""
    tree, text = RadixTree(page_size=2, lookahead=lookahead), (1, 2, 3, 4, 5, 6)
    add_path(
        tree, *(text[i : i + 2 + lookahead] for i in range(0, 6 - 2 * lookahead, 2)), first_page=10
    )
    assert pages_of(tree.match(tree.root, tokens, limit)) == pages
    tree.check_integrity()


def test_the_closest_child_is_that_of_a_scan_over_all_children() -> None:
    rng = random.Random(0)
    tree = RadixTree(page_size=6)
    for page in range(1, 300):
        insert(tree, tree.root, tuple(rng.choices(range(3), k=rng.randint(1, 6))), page)
    tree.check_integrity()

    def shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b),
            min(len(left), len(right)),
        )

    for _ in range(500):
        key = tuple(rng.choices(range(4), k=rng.randint(0, 6)))
        child, length = tree.closest_child(tree.root, key)
        assert length == max(shared(key, other) for other in tree.root.children)
        assert (child is None) == (length == 0)
        assert child is None or shared(key, child.key) == length


def test_an_equal_key_is_cached_once_and_the_second_page_is_left_over() -> None:
    tree = RadixTree(page_size=2)
    first, _ = insert(tree, tree.root, (1, 2), 7)
    assert insert(tree, tree.root, (1, 2), 8) == (first, 8)
    assert first.pages == [7]


def test_a_partial_leaf_is_replaced_by_a_key_that_extends_it_and_kept_next_to_another() -> None:
    tree = RadixTree(page_size=4)
    insert(tree, tree.root, (1, 2), 1)
    _, left_over = insert(tree, tree.root, (1, 3, 5, 7), 2)
    assert left_over is None
    _, left_over = insert(tree, tree.root, (1, 2, 3), 3)
    assert left_over == 1
    full, left_over = insert(tree, tree.root, (1, 2, 3, 4), 4)
    assert left_over == 3
    assert insert(tree, tree.root, (1, 2), 5) == (full, 5)
    assert sorted(tree.root.children) == [(1, 2, 3, 4), (1, 3, 5, 7)]
    tree.check_integrity()


def test_with_lookahead_equal_pages_with_different_next_tokens_stand_side_by_side() -> None:
    tree = RadixTree(page_size=2, lookahead=1)
    first, _ = insert(tree, tree.root, (1, 2, 3), 1)
    second, left_over = insert(tree, tree.root, (1, 2, 4), 2)
    assert (first.pages, second.pages, left_over) == ([1], [2], None)
    assert insert(tree, tree.root, (1, 2), 3) == (first, 3)
    insert(tree, tree.root, (5, 6), 4)
    assert insert(tree, tree.root, (5, 6, 7), 5)[1] == 4
    tree.check_integrity()


def test_a_released_path_is_evicted_leaf_first() -> None:
    tree = RadixTree(page_size=1)
    release(tree, add_path(tree, (1,), (2,), (3,), first_page=1))
    assert evict_all(tree) == [3, 2, 1]
    assert tree.match(tree.root, [1, 2, 3], 3) == []


def test_the_least_recently_released_path_is_evicted_first() -> None:
    tree = RadixTree(page_size=1)
    older = add_path(tree, (1,), (2,), first_page=1)
    newer = add_path(tree, (5,), (6,), first_page=3)
    release(tree, older)
    release(tree, newer)
    hold(tree, older)
    release(tree, older)
    assert evict_all(tree) == [4, 3, 2, 1]


def test_a_page_with_a_cached_child_outlives_the_child_even_if_the_child_was_released_later() -> (
    None
):
    tree = RadixTree(page_size=1)
    trunk = add_path(tree, (1,), first_page=1)
    left, _ = insert(tree, trunk[0], (2,), 2)
    right, _ = insert(tree, trunk[0], (3,), 3)
    hold(tree, [left, right, trunk[0]])
    release(tree, [trunk[0], left])
    release(tree, [trunk[0], right])
    tree.check_integrity()
    assert evict_all(tree) == [2, 3, 1]


def test_held_pages_are_not_evictable() -> None:
    tree = RadixTree(page_size=1)
    path = add_path(tree, (1,), (2,), first_page=1)
    hold(tree, path[:1])
    release(tree, path)
    assert evict_all(tree) == [2]
    assert pages_of(tree.match(tree.root, [1, 2], 2)) == [1]


def test_touching_an_unreferenced_page_makes_it_the_last_to_go() -> None:
    tree = RadixTree(page_size=1)
    nodes = [insert(tree, tree.root, (token,), token)[0] for token in (1, 2, 3)]
    tree.touch(nodes[0])
    assert evict_all(tree) == [2, 3, 1]


def test_inserting_a_cached_key_again_counts_as_a_use() -> None:
    tree = RadixTree(page_size=2)
    for page in (1, 2):
        insert(tree, tree.root, (page, 0), page)
    insert(tree, tree.root, (1,), 3)
    assert evict_all(tree) == [2, 1]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda tree, path: path[1].num_users.__setitem__(0, 0), "evictable"),
        (lambda tree, path: release(tree, path[:1]), "its parent 1 is not"),
        (lambda tree, path: path[0].child_keys.clear(), "sorted keys below pages"),
        (lambda tree, path: setattr(path[1], "parent", tree.root), "linked to the wrong parent"),
        (
            lambda tree, path: tree.root.children.clear() or tree.root.child_keys.clear(),
            "left the tree",
        ),
    ],
)
def test_the_integrity_check_names_the_inconsistency(damage, sentence) -> None:
    tree = RadixTree(page_size=1)
    path = add_path(tree, (1,), (2,), first_page=1)
    insert(tree, tree.root, (9,), 3)
    tree.check_integrity()
    damage(tree, path)
    with pytest.raises(AssertionError, match=sentence):
        tree.check_integrity()


@pytest.mark.parametrize(
    ("key", "held", "sentence"),
    [
        ((9, 4, 5), True, "its parent ends with"),
        ((3,), False, "cache 0 tokens"),
        ((3, 4, 5, 6), False, "cache 3 tokens"),
        ((3, 4), True, "a partial leaf with pages .2. is held"),
    ],
)
def test_with_lookahead_the_integrity_check_names_a_key_that_cannot_be(key, held, sentence) -> None:
    tree = RadixTree(page_size=2, lookahead=1)
    path = add_path(tree, (1, 2, 3), first_page=1)
    node, _ = insert(tree, path[0], key, 2)
    if held:
        hold(tree, [node])
    with pytest.raises(AssertionError, match=sentence):
        tree.check_integrity()


class Looks(list[Key]):
    """Counts the keys that are looked at."""

    number = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.number += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Iterator[Key]:
        for key in super().__iter__():
            self.number += 1
            yield key


def test_the_closest_of_many_children_is_found_without_looking_at_all_of_them() -> None:
    tree = RadixTree(page_size=3)
    for number in range(20_000):
        insert(tree, tree.root, (0, number, 0), number + 1)
    looks = Looks(tree.root.child_keys)
    tree.root.child_keys = looks
    for number in range(0, 20_000, 200):
        child, length = tree.closest_child(tree.root, (0, number, 1))
        assert child is not None and (child.key[1], length) == (number, 2)
    assert looks.number < 100 * 20  # log2(20,000) is 14.3
