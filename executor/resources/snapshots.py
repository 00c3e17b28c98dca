"""Which cached prefixes have a copy of the recurrent states after them.

A state cannot be taken back, so a prefix can only be reused up to such a copy. There is a fixed
number of them; the least recently used one is replaced. This module knows numbers and nodes of the
prefix tree: no tensors."""

from collections import OrderedDict
from collections.abc import Iterable

from tllm_spec.executor.resources.radix import Node


class Snapshots:
    """`number` copies, of prefixes that are multiples of `every` tokens. No request holds one: what
    a new request needs is copied from it at once."""

    def __init__(self, number: int, every: int) -> None:
        self.every = every
        self._number = number
        self._free = list(range(number))
        self._of = OrderedDict[Node, int]()  # least recently used first

    def __contains__(self, node: Node) -> bool:
        return node in self._of

    def use(self, node: Node) -> int:
        """The copy of the prefix that ends with the node, which has one."""
        self._of.move_to_end(node)
        return self._of[node]

    def take(self, node: Node) -> int | None:
        """The number of the copy that the states after the node are to be written to; None: they
        are there already."""
        if node in self._of:
            self._of.move_to_end(node)
            return None
        number = self._free.pop() if self._free else self._of.popitem(last=False)[1]
        self._of[node] = number
        return number

    def drop(self, node: Node) -> None:
        """The node has left the tree."""
        if (number := self._of.pop(node, None)) is not None:
            self._free.append(number)

    def check_integrity(self, cached: Iterable[Node]) -> None:
        """cached: all nodes of the tree. Raises AssertionError with a sentence about a copy that is
        lost or listed twice, or whose prefix is not cached."""
        assert not set(self._of) - set(cached), "a snapshot is of a prefix that is not cached"
        assert sorted([*self._free, *self._of.values()]) == list(range(self._number)), (
            f"{len(self._free)} free + {len(self._of)} used snapshots are not {self._number}"
        )
