"""A radix tree over page contents: which page holds the KV of which tokens, and which page to evict
next.

One node is one page. The path from the root spells the tokens before it, and a node's KV is valid
for exactly that prefix. The tree counts references. It does not know the holders, the free pages or
the device.

Invariant, kept by the callers: a holder of a node holds all of its ancestors. A node without
references then has no held descendant, so every such node can be evicted (children first), and
their number is the number of evictable pages.

Requests with the same salt share pages, and no others: each salt has a root of its own.

With `lookahead` 1 the KV of a token also depends on the token after it: the entry at index j of an
EAGLE head is made of hidden state j and token j + 1. A key then has one token more than entries,
and a child's key begins with the last token of its parent's key."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from weakref import WeakValueDictionary

Key = tuple[int, ...]


class Node:
    """A cached page. `key` has `page_size + lookahead` tokens; fewer in a partial leaf, which is
    never held and has no children."""

    __slots__ = ("__weakref__", "child_keys", "children", "key", "page", "parent", "ref_count")

    def __init__(self, key: Key, page: int, parent: "Node | None") -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.ref_count = 0
        self.children: dict[Key, Node] = {}
        # Sorted: of all keys, a neighbour has the longest common prefix with a new one.
        self.child_keys: list[Key] = []


class RadixTree:
    """Pages by the tokens that they hold, with LRU eviction of pages without references."""

    def __init__(self, page_size: int, lookahead: int = 0) -> None:
        self._page_size = page_size
        self._lookahead = lookahead
        self.root = _new_root()  # of requests without a salt
        # The others live as long as there are pages below them, which refer to them.
        self._roots: WeakValueDictionary[str | None, Node] = WeakValueDictionary({None: self.root})
        # Every unreferenced node, least recently used first. A child comes before its parent: paths
        # are released leaf first, and children are only added below held nodes. So the first node
        # is always a leaf.
        self._evictable: OrderedDict[Node, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def root_of(self, salt: str | None) -> Node:
        """The empty prefix of the requests with this salt. It is never held and never evicted."""
        return self._roots.setdefault(salt, _new_root())

    def match(self, root: Node, tokens: Sequence[int], limit: int) -> list[Node]:
        """The nodes of the longest cached run of full pages below `root` within the entries of
        `tokens[:limit]`."""
        size, children, nodes = self._page_size, root.children, []
        key_len = size + self._lookahead
        for start in range(0, limit - size + 1, size):
            node = children.get(tuple(tokens[start : start + key_len]))
            if node is None:
                break
            nodes.append(node)
            children = node.children
        return nodes

    def closest_child(self, parent: Node, key: Key) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with `key`, and how many; `(None, 0)` if none
        does."""
        position = bisect_left(parent.child_keys, key)
        neighbours = parent.child_keys[max(position - 1, 0) : position + 1]
        length, closest = max(
            ((_common_length(near, key), near) for near in neighbours), default=(0, ())
        )
        return (parent.children[closest], length) if length else (None, 0)

    def insert(self, parent: Node, key: Key, page: int) -> tuple[Node, int | None]:
        """Caches `page` below `parent` (held, or a root); returns the node for `key` and a page
        to free, or None.

        The page to free is `page` itself if a child already begins with `key`, or that of a partial
        leaf that `key` extends."""
        keys = parent.child_keys
        position = bisect_left(keys, key)
        if position < len(keys) and keys[position][: len(key)] == key:
            node = parent.children[keys[position]]
            self.touch(node)
            return node, page
        left_over = None
        # No key begins with another one, so a key that `key` extends can only be its predecessor.
        if position > 0 and key[: len(keys[position - 1])] == keys[position - 1]:
            position -= 1
            left_over = self._remove(parent.children[keys[position]])
        node = parent.children[key] = Node(key, page, parent)
        keys.insert(position, key)
        self._evictable[node] = None
        return node, left_over

    def hold(self, nodes: Iterable[Node]) -> None:
        """Adds a reference to each node."""
        for node in nodes:
            if node.ref_count == 0:
                del self._evictable[node]
            node.ref_count += 1

    def release(self, path: Sequence[Node]) -> None:
        """Drops one reference to each node of a path that starts at the root."""
        for node in reversed(path):
            node.ref_count -= 1
            if node.ref_count == 0:
                self._evictable[node] = None

    def touch(self, node: Node) -> None:
        """Makes `node` the most recently used one. Its parent must be held or a root."""
        if node.ref_count == 0:
            self._evictable.move_to_end(node)

    def evict(self) -> int:
        """Drops the least recently used unreferenced page and returns it."""
        return self._remove(next(iter(self._evictable)))

    def _remove(self, leaf: Node) -> int:
        assert leaf.parent is not None and not leaf.children, "only leaves leave the tree"
        del self._evictable[leaf]
        del leaf.parent.children[leaf.key]
        del leaf.parent.child_keys[bisect_left(leaf.parent.child_keys, leaf.key)]
        return leaf.page

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        pending = [node for root in self._roots.values() for node in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raises AssertionError with a sentence about the first inconsistency."""
        order = {node: rank for rank, node in enumerate(self._evictable)}
        for root in self._roots.values():
            self._check_children(root)
        for node in self.nodes():
            self._check_children(node)
            full = len(node.key) == self._page_size + self._lookahead
            assert full or not (node.children or node.ref_count), (
                f"partial page {node.page} is held or a parent"
            )
            assert (node.ref_count == 0) == (node in order), (
                f"page {node.page} has {node.ref_count} references but evictable is {node in order}"
            )
            if node.parent in order:
                assert node in order, (
                    f"page {node.page} is held but its parent {node.parent.page} is not"
                )
                assert order[node] < order[node.parent], (
                    f"page {node.page} would be evicted after its parent"
                )
        assert len(order) == sum(node.ref_count == 0 for node in self.nodes()), (
            "an evictable page left the tree"
        )

    def _check_children(self, parent: Node) -> None:
        keys = parent.child_keys
        assert keys == sorted(parent.children), (
            f"the sorted keys below page {parent.page} differ from its children"
        )
        overlap = parent.key[self._page_size :]
        for key, node in parent.children.items():
            assert node.key == key and node.parent is parent, (
                f"page {node.page} is linked to the wrong parent or key"
            )
            assert 0 < len(key) - self._lookahead <= self._page_size, (
                f"page {node.page} caches {len(key) - self._lookahead} tokens"
            )
            assert key[: len(overlap)] == overlap, (
                f"page {node.page} begins with {key[: len(overlap)]}, "
                f"its parent ends with {overlap}"
            )
        for shorter, longer in pairwise(keys):
            assert longer[: len(shorter)] != shorter, (
                f"below page {parent.page}, {shorter} is a prefix of {longer}"
            )


def _new_root() -> Node:
    return Node((), 0, None)


def _common_length(left: Key, right: Key) -> int:
    for length, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return length
    return min(len(left), len(right))
