"""A radix tree over page contents: which pages hold the KV of which tokens, and which page to evict
next.

One node is the tokens of one page. The path from the root spells the tokens before it, and a node's
KV is valid for exactly that prefix. A node has a page in each layer group, or none where the page
was evicted or was gone before the tokens came here. The tree counts references. It does not know
the holders, the free pages or the device.

Groups that keep all keys have a page in every node. In groups that see a span of the keys, pages
are evicted one by one, wherever they are on a path; a node leaves the tree when nothing needs it.

Invariant, kept by the callers: a holder of a node holds all of its ancestors, and their pages in
the groups that keep all keys. Such a page without references then has no held descendant, so each
can be evicted (children first), and their number is the number of evictable pages.

Requests with the same salt share pages, and no others: each salt has a root of its own.

With `lookahead` 1 the KV of a token also depends on the token after it: the entry at index j of an
EAGLE head is made of hidden state j and token j + 1. A key then has one token more than entries,
and a child's key begins with the last token of its parent's key."""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from weakref import WeakValueDictionary

from tllm_spec.lora_request import AdapterSalt, CacheSalt

Key = tuple[int, ...]
NO_PAGE = 0  # the dummy page, which no node has


class Node:
    """The cached pages of some tokens, `NO_PAGE` in the groups without one. `key` has `page_size +
    lookahead` tokens; fewer in a partial leaf, which is never held and has no children.

    `num_holders` counts the sequences whose path has the node, `num_users` in each group those that
    hold its page. `salt`: of a root. `name`: by which host_pages.py knows it; None: not known."""

    __slots__ = (
        "__weakref__",
        "child_keys",
        "children",
        "key",
        "name",
        "num_holders",
        "num_users",
        "pages",
        "parent",
        "salt",
    )

    def __init__(
        self, key: Key, pages: Sequence[int], parent: "Node | None", salt: CacheSalt = None
    ) -> None:
        self.key = key
        self.pages = list(pages)
        self.parent = parent
        self.salt = salt
        self.name: bytes | None = None
        self.num_holders = 0
        self.num_users = [0] * len(self.pages)
        self.children: dict[Key, Node] = {}
        # Sorted: of all keys, a neighbour has the longest common prefix with a new one.
        self.child_keys: list[Key] = []


class RadixTree:
    """Pages by the tokens that they hold, with LRU eviction of pages without references.

    keeps_all: of each group, whether it keeps all keys. Each of `on_change` is called with a node
    that is new, or of which a page of a group without all keys has come or gone; each of `on_leave`
    with a node that leaves the tree."""

    def __init__(
        self, page_size: int, lookahead: int = 0, keeps_all: Sequence[bool] = (True,)
    ) -> None:
        self._page_size = page_size
        self._lookahead = lookahead
        self._keeps_all = keeps_all
        self.on_change: list[Callable[[Node], None]] = []
        self.on_leave: list[Callable[[Node], None]] = []
        # Roots live as long as there are nodes below them, which refer to them; that of requests
        # without a salt always.
        self._roots = WeakValueDictionary[tuple[int | str, CacheSalt], Node]()
        self.start_version(0)
        # In each group every node whose page no request holds, least recently used first. Where all
        # keys are kept, a child comes before its parent: paths are released leaf first, and
        # children are only added below held nodes. So the first node is always a leaf.
        self._evictable: list[OrderedDict[Node, None]] = [OrderedDict() for _ in keeps_all]

    def num_evictable(self, group: int = 0) -> int:
        return len(self._evictable[group])

    def is_current(self, root: Node) -> bool:
        """Whether the root is of the present version."""
        return self._roots.get((self._version, root.salt)) is root

    @property
    def is_empty(self) -> bool:
        return not any(root.children for root in self._roots.values())

    def start_version(self, version: int | str) -> None:
        """Begins a version: nothing that was stored before is found; it stays until it is
        evicted."""
        self._version = version
        self.root = self._new_root(None)
        self._roots[version, None] = self.root

    def root_of(self, salt: CacheSalt) -> Node:
        """The empty prefix of the requests with this salt. It is never held and never evicted."""
        root = self._roots.get((self._version, salt))
        if root is None:
            root = self._roots[self._version, salt] = self._new_root(salt)
        return root

    def _new_root(self, salt: CacheSalt) -> Node:
        root = Node((), [NO_PAGE] * len(self._keeps_all), None, salt)
        root.name = repr((self._version, salt)).encode()
        return root

    def match(self, root: Node, tokens: Sequence[int], limit: int) -> list[Node]:
        """The nodes of the longest run of full pages below `root` within the entries of
        `tokens[:limit]`. Some may have no page in some groups."""
        children, nodes = root.children, []
        for key in self.keys(tokens, limit):
            node = children.get(key)
            if node is None:
                break
            nodes.append(node)
            children = node.children
        return nodes

    def keys(self, tokens: Sequence[int], limit: int) -> Iterator[Key]:
        """Yields the keys of the full pages within the entries of `tokens[:limit]`."""
        size = self._page_size
        for start in range(0, limit - size + 1, size):
            yield tuple(tokens[start : start + size + self._lookahead])

    def closest_child(self, parent: Node, key: Key) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with `key`, and how many; `(None, 0)` if none
        does."""
        position = bisect_left(parent.child_keys, key)
        neighbours = parent.child_keys[max(position - 1, 0) : position + 1]
        length, closest = max(
            ((_common_length(near, key), near) for near in neighbours), default=(0, ())
        )
        return (parent.children[closest], length) if length else (None, 0)

    def insert(self, parent: Node, key: Key, pages: Sequence[int]) -> tuple[Node, list[int]]:
        """Caches `pages`, one of each group or `NO_PAGE`, below `parent` (held, or a root).
        Returns the node for `key`, and in each group a page to free or `NO_PAGE`.

        The pages to free are the given ones that a node for `key` has already, or, if a child
        begins with `key`, all of them; or those of a partial leaf that `key` extends."""
        keys = parent.child_keys
        position = bisect_left(keys, key)
        if position < len(keys) and keys[position][: len(key)] == key:
            node = parent.children[keys[position]]
            self.touch(node)
            return node, self._complete(node, pages) if node.key == key else list(pages)
        left_over = [NO_PAGE] * len(pages)
        # No key begins with another one, so a key that `key` extends can only be its predecessor.
        if position > 0 and key[: len(keys[position - 1])] == keys[position - 1]:
            position -= 1
            left_over = self._remove(parent.children[keys[position]])
        node = parent.children[key] = Node(key, pages, parent)
        keys.insert(position, key)
        for group, page in enumerate(pages):
            if page != NO_PAGE:
                self._evictable[group][node] = None
        for tell in self.on_change:
            tell(node)
        return node, left_over

    def _complete(self, node: Node, pages: Sequence[int]) -> list[int]:
        """Gives the node the pages of the groups in which it has none, and returns the others."""
        left_over = list(pages)
        for group, page in enumerate(pages):
            if page != NO_PAGE and node.pages[group] == NO_PAGE:
                node.pages[group], left_over[group] = page, NO_PAGE
                self._evictable[group][node] = None
        if left_over != pages:
            for tell in self.on_change:
                tell(node)
        return left_over

    def hold(self, nodes: Sequence[Node], firsts: Sequence[int]) -> None:
        """Adds a reference to each node, and in each group to the pages of the nodes from index
        `firsts[group]` on, which must be there."""
        for node in nodes:
            node.num_holders += 1
        for group, first in enumerate(firsts):
            evictable = self._evictable[group]
            for node in nodes[first:]:
                if node.num_users[group] == 0:
                    del evictable[node]
                node.num_users[group] += 1

    def release(self, path: Sequence[Node], firsts: Sequence[int]) -> None:
        """Drops the references that `hold` added for a path that starts at the root."""
        for group, first in enumerate(firsts):
            for node in reversed(path[first:]):
                self.let_go(node, group)
        for node in reversed(path):
            node.num_holders -= 1
            self._drop_if_needless(node)

    def let_go(self, node: Node, group: int) -> None:
        """Drops a reference to the node's page in one group."""
        node.num_users[group] -= 1
        if node.num_users[group] == 0:
            self._evictable[group][node] = None

    def touch(self, node: Node) -> None:
        """Makes `node` the most recently used one. Its parent must be held or a root."""
        for group, evictable in enumerate(self._evictable):
            if node.num_users[group] == 0 and node.pages[group] != NO_PAGE:
                evictable.move_to_end(node)

    def next_evicted(self, group: int) -> Node:
        return next(iter(self._evictable[group]))

    def is_full(self, node: Node) -> bool:
        return len(node.key) == self._page_size + self._lookahead

    def evict(self, group: int = 0) -> list[int]:
        """Drops the least recently used page of a group among those that no request holds. Returns
        what leaves the tree in each group: a page, or `NO_PAGE`.

        The other pages of the same tokens go with one that keeps all keys, since no hit could reach
        them. Otherwise they stay."""
        node = self.next_evicted(group)
        if self._keeps_all[group] or len(node.key) < self._page_size + self._lookahead:
            return self._remove(node)
        left = [NO_PAGE] * len(node.pages)
        left[group], node.pages[group] = node.pages[group], NO_PAGE
        del self._evictable[group][node]
        for tell in self.on_change:
            tell(node)
        self._drop_if_needless(node)
        return left

    def _drop_if_needless(self, node: Node) -> None:
        """Takes a node without pages, holders and children out of the tree, and then its parent, if
        that is left like this."""
        while node.parent and not (any(node.pages) or node.num_holders or node.children):
            parent = node.parent
            self._remove(node)
            node = parent

    def _remove(self, leaf: Node) -> list[int]:
        """Returns the pages of the node."""
        assert leaf.parent is not None and not leaf.children, "only leaves leave the tree"
        for group, page in enumerate(leaf.pages):
            if page != NO_PAGE:
                del self._evictable[group][leaf]
        del leaf.parent.children[leaf.key]
        del leaf.parent.child_keys[bisect_left(leaf.parent.child_keys, leaf.key)]
        for tell in self.on_leave:
            tell(leaf)
        return leaf.pages

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents first."""
        pending = [node for root in self._roots.values() for node in root.children.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check_integrity(self) -> None:
        """Raises AssertionError with a sentence about the first inconsistency."""
        for root in self._roots.values():
            self._check_children(root)
        for node in self.nodes():
            self._check_children(node)
            full = len(node.key) == self._page_size + self._lookahead
            assert full or not (node.children or node.num_holders), (
                f"a partial leaf with pages {node.pages} is held or a parent"
            )
            assert any(node.pages) or node.num_holders or node.children, (
                f"nothing needs a node of the tokens {node.key}"
            )
        for group, keeps_all in enumerate(self._keeps_all):
            self._check_group(group, keeps_all=keeps_all)

    def _check_group(self, group: int, *, keeps_all: bool) -> None:
        order = {node: rank for rank, node in enumerate(self._evictable[group])}
        nodes = [node for node in self.nodes() if keeps_all or node.pages[group] != NO_PAGE]
        for node in nodes:
            page, num_users = node.pages[group], node.num_users[group]
            assert page != NO_PAGE, f"a node has no page in group {group}, which keeps all keys"
            assert num_users <= node.num_holders, f"page {page} is held by more than its node"
            assert (num_users == 0) == (node in order), (
                f"page {page} has {num_users} references but evictable is {node in order}"
            )
            if keeps_all and node.parent in order:
                assert node in order, (
                    f"page {page} is held but its parent {node.parent.pages[group]} is not"
                )
                assert order[node] < order[node.parent], (
                    f"page {page} would be evicted after its parent"
                )
        assert len(order) == sum(node.num_users[group] == 0 for node in nodes), (
            "an evictable page left the tree"
        )

    def _check_children(self, parent: Node) -> None:
        keys = parent.child_keys
        assert keys == sorted(parent.children), (
            f"the sorted keys below pages {parent.pages} differ from its children"
        )
        overlap = parent.key[self._page_size :]
        for key, node in parent.children.items():
            assert node.key == key and node.parent is parent, (
                f"a node with pages {node.pages} is linked to the wrong parent or key"
            )
            assert 0 < len(key) - self._lookahead <= self._page_size, (
                f"pages {node.pages} cache {len(key) - self._lookahead} tokens"
            )
            assert key[: len(overlap)] == overlap, (
                f"pages {node.pages} begin with {key[: len(overlap)]}, "
                f"its parent ends with {overlap}"
            )
        for shorter, longer in pairwise(keys):
            assert longer[: len(shorter)] != shorter, (
                f"below pages {parent.pages}, {shorter} is a prefix of {longer}"
            )


def _common_length(left: Key, right: Key) -> int:
    for length, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return length
    return min(len(left), len(right))


def num_unreferenced(nodes: Sequence[Node], group: int) -> int:
    return sum(node.num_users[group] == 0 for node in nodes)


# Names of cached pages that processes agree on: a hash of a page's tokens, of all tokens before
# them and of the salt, which may have an adapter.


NO_BLOCK = 0  # before the first page of the requests without a salt


def salt_hash(salt: str | AdapterSalt) -> str:
    """What stands for a salt outside the engine, in hexadecimal digits. No client's own salt can
    have the hash of an adapter's."""
    if isinstance(salt, str):
        return blake2b(salt.encode(), digest_size=8).hexdigest()
    key = blake2b(salt.adapter.encode()).digest()
    return blake2b((salt.own or "").encode(), digest_size=8, key=key).hexdigest()


def first_parent(salt: CacheSalt) -> int:
    """What the first page of the requests with this salt follows, in place of a page."""
    return NO_BLOCK if salt is None else int(salt_hash(salt), 16)


def block_hash(parent: int, tokens: Sequence[int]) -> int:
    """64 bits for the page with these tokens after the page with the hash `parent`."""
    data = array("Q", (parent, *tokens)).tobytes()
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def block_hashes(tokens: Sequence[int], page_size: int, salt: CacheSalt) -> list[int]:
    """Hashes the full pages that a request with these tokens can find in a cache: the last token
    is computed in any case."""
    hashes, parent = [], first_parent(salt)
    for start in range(0, len(tokens) - page_size, page_size):
        parent = block_hash(parent, tokens[start : start + page_size])
        hashes.append(parent)
    return hashes
