"""Pages that were evicted from the device and are kept in host memory, by their tokens.

A page comes back by a copy to a page of the device, and then is in the prefix tree as before. Its
place in host memory is kept, so a later eviction needs no copy. The least recently used place is
given to another page when all are taken."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from tllm_spec.executor.device.transfer import HostCopies
from tllm_spec.executor.resources.radix import Key, Node, RadixTree


class HostPages:
    """Which place has which page. A page is named by a hash of 128 bits of its key and of all keys
    before it, which is kept in the node."""

    def __init__(self, num_places: int, copies: HostCopies) -> None:
        self.num_places = num_places
        self._copies = copies
        self._free = list(range(num_places - 1, -1, -1))
        self._places: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self.num_saved = self.num_loaded = 0

    def save(self, node: Node) -> None:
        """The node's pages are about to be evicted."""
        name = name_of(node)
        if name in self._places:
            self._places.move_to_end(name)
        elif self._free or self._places:  # or all are coming back now
            place = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            self._places[name] = place
            self._copies.save(node.pages, place)
            self.num_saved += 1

    def restore(
        self,
        tree: RadixTree,
        root: Node,
        tokens: Sequence[int],
        insert: Callable[[Node, Key], Node | None],
    ) -> None:
        """Brings the pages of a prompt's beginning that are not on the device back to it. insert:
        makes a node with new pages, for which others may be evicted; None: there is no room."""
        limit = max(len(tokens) - 1, 0)
        nodes = tree.match(root, tokens, limit)
        keys = list(tree.keys(tokens, limit))[len(nodes) :]
        name, taken = name_of(nodes[-1] if nodes else root), list[tuple[bytes, int]]()
        for key in keys:
            name = _name(name, key)
            if (place := self._places.pop(name, None)) is None:
                break
            taken.append((name, place))
        firsts = [0] * len(root.pages)
        tree.hold(nodes, firsts)  # they must not make room
        has_room = True
        for (_, place), key in zip(taken, keys, strict=False):
            node = insert(nodes[-1] if nodes else root, key) if has_room else None
            if node is not None:
                tree.hold([node], firsts)
                nodes.append(node)
                self._copies.load(place, node.pages)
                self.num_loaded += 1
            has_room = node is not None
        tree.release(nodes, firsts)
        for name, place in reversed(taken):  # the first ones are the most useful
            self._places[name] = place

    def clear(self) -> None:
        self._free.extend(self._places.values())
        self._places.clear()

    def state(self) -> dict[str, Any]:
        return {
            "num_pages": self.num_places,
            "used": len(self._places),
            "saved": self.num_saved,
            "loaded": self.num_loaded,
        }

    def check_integrity(self) -> None:
        """Raises AssertionError for a place that is lost or used twice."""
        places = sorted([*self._free, *self._places.values()])
        assert places == list(range(self.num_places)), (
            f"{len(self._free)} free + {len(self._places)} used places are not the "
            f"{self.num_places} places in host memory, each once"
        )


def name_of(node: Node) -> bytes:
    """Kept in the node, and in those before it. A root has its name from the tree."""
    path = []
    while node.name is None:
        assert node.parent is not None
        path.append(node)
        node = node.parent
    name = node.name
    for each in reversed(path):
        name = each.name = _name(name, each.key)
    return name


def _name(parent: bytes, key: Key) -> bytes:
    return blake2b(parent + repr(key).encode(), digest_size=16).digest()
