"""Drafts of trees that are made on the host: a drafter gives paths, or tokens and their parents."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import index
from typing import Any, NamedTuple

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.draft_layout import MAX_NODES
from tllm_spec.option_checks import shown

# Rows of padding follow the root and are never accepted.
_PADDING_BITS = [1 | 1 << row for row in range(MAX_NODES - 1)] + [1 - (1 << 63)]


class HostTree(NamedTuple):
    """A draft tree of one request. `tokens` of the drafts, by depth. The others are of the window's
    rows, of which the first is the root: `parents` (-1 for the root), `depths`, and `bits`: bit j
    of row r: r is j or descends from j, as int64."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    bits: list[int]

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[Any]]) -> "HostTree":
        """Equal beginnings of paths become one. Raises TypeError for what is no token id."""
        nodes: dict[tuple[int, int], int] = {}
        tokens, parents = list[int](), list[int]()
        for path in paths:
            node = 0
            for token in map(index, path):
                child = nodes.get((node, token))
                if child is None:
                    tokens.append(token)
                    parents.append(node)
                    child = nodes[node, token] = len(tokens)
                node = child
        return cls.of_parents(tokens, parents)

    @classmethod
    def of_parents(cls, tokens: Sequence[Any], parents: Sequence[Any]) -> "HostTree":
        """parents: of each token, 0 for the root and n for the n-th token. Raises TypeError for
        what is no number, and ValueError for more rows than there are bits, a parent that is not
        an earlier node, and equal children of a node."""
        if len(tokens) != len(parents):
            raise ValueError(f"{len(tokens)} tokens have {len(parents)} parents")
        if len(tokens) >= MAX_NODES:
            raise ValueError(f"a tree has at most {MAX_NODES - 1} tokens, not {len(tokens)}")
        tokens, parents = list(map(index, tokens)), list(map(index, parents))
        depths = [0]
        for node, parent in enumerate(parents, 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents: node {node} has the parent {parent}; accepted are 0 to {node - 1}"
                )
            depths.append(depths[parent] + 1)
        children = list(zip(parents, tokens, strict=True))
        if len(set(children)) < len(children):
            repeated = next(i for i, child in enumerate(children) if child in children[:i])
            raise ValueError(
                f"nodes {1 + children.index(children[repeated])} and {1 + repeated} are both "
                f"{tokens[repeated]} after node {parents[repeated]}"
            )
        if (ordered := sorted(depths)) != depths:
            tokens, parents = _by_depth(tokens, parents, depths)
        return cls(tokens, [-1, *parents], ordered, _bits(parents))

    @property
    def depth(self) -> int:
        return self.depths[-1]

    @property
    def is_chain(self) -> bool:
        return self.depth == len(self.tokens)

    def up_to(self, depth: int) -> "HostTree":
        """Without deeper drafts."""
        rows = bisect_right(self.depths, depth)
        if rows == len(self.depths):
            return self
        parents, depths, bits = (each[:rows] for each in self[1:])
        return HostTree(self.tokens[: rows - 1], parents, depths, bits)


class HostTreeDrafter(HostDrafter):
    """A `HostDrafter` whose drafts are trees. Windows of a round have as many rows as its deepest
    tree may have, or, if no tree has a branch, as that chain has."""

    def __init__(
        self,
        inner: Drafter,
        resource_manager: ResourceManager | None,
        slots: SlotState,
        vocab_size: int,
    ) -> None:
        super().__init__(inner, resource_manager, slots, vocab_size)
        self._found: list[HostTree] = []  # of a round's requests, in order
        # To the dummy slot: compiles the kernel before the first request.
        self._send([len(slots.kv_lens) - 1], [HostTree.of_paths([])], [0])

    def _propose(self, batch: ScheduledBatch) -> None:
        for request in batch.generation_requests:
            request.py_draft_parents = None
        super()._propose(batch)

    def _are_valid(self, drafts: list[Any]) -> bool:
        self._found.clear()
        return False  # each is checked, and becomes a tree

    def _check(self, request: LlmRequest) -> None:
        self.culprits = [request]
        tokens, parents = request.py_draft_tokens, request.py_draft_parents
        try:
            tree = _tree_of(tokens, parents)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the drafter proposed {shown(tokens)} with the parents {shown(parents)}, which "
                f"are no tree of token ids: {error}"
            ) from error
        longest = self._slots.shapes.longest
        if tree.depth > longest.depth or len(tree.tokens) > longest.num_nodes:
            raise ValueError(
                f"the drafter proposed {len(tree.tokens)} tokens on paths of up to {tree.depth}; "
                f"max_total_draft_tokens is {longest.num_nodes} and max_draft_len {longest.depth}"
            )
        if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < self._vocab_size:
            raise ValueError(
                f"the drafter proposed {tree.tokens}; the model has token ids 0 to "
                f"{self._vocab_size - 1}"
            )
        self._found.append(tree)
        self.culprits = []

    def _pad(self, batch: ScheduledBatch, wanted: list[int]) -> None:
        requests = batch.generation_requests
        trees = list(map(_better, requests, self._found, wanted))
        for request, tree in zip(requests, trees, strict=True):
            request.py_draft_tokens, request.py_draft_parents = tree.tokens, None
            request.py_num_draft_tokens = tree.depth
        batch.num_steps = max(tree.depth for tree in trees)
        batch.shape = self._slots.shapes.fitting(
            batch.num_steps, is_chain=all(tree.is_chain for tree in trees)
        )
        if batch.num_steps:
            slot_ids = [request.slot for request in requests]
            self._send(slot_ids, trees, [request.tokens[-1] for request in requests])

    def _send(
        self, slot_ids: Sequence[int], trees: Sequence[HostTree], padding: Sequence[int]
    ) -> None:
        """Sends the trees to the slots in one copy, all as wide as a tree may be, so that one
        kernel is compiled.

        padding: the token after each tree: its request's own last one, since another token's
        embedding might be NaN."""
        batch, width = len(slot_ids), self._slots.shapes.longest.window
        numbers = chain(
            slot_ids,
            (len(tree.tokens) for tree in trees),
            *(
                tree.tokens + [token] * (width - len(tree.parents))
                for tree, token in zip(trees, padding, strict=True)
            ),
            *(tree.parents + [0] * (width - len(tree.parents)) for tree in trees),
            *(tree.depths + [1] * (width - len(tree.parents)) for tree in trees),
            *(tree.bits + _PADDING_BITS[len(tree.parents) : width] for tree in trees),
        )
        sent = to_device(array("q", numbers), self._slots.device)
        sizes = [batch * size for size in (1, 1, width - 1, width, width, width)]
        slots, num_drafts, *rows = sent.split_with_sizes(sizes)
        tree = DraftTree(*(each.view(batch, -1) for each in rows))
        self._slots.write_tree(slots, tree, num_drafts)


def _better(request: LlmRequest, tree: HostTree, limit: int) -> HostTree:
    """Of depth `limit` at most. The request's grammar may know a better chain."""
    tree, grammar = tree.up_to(limit), request.grammar
    if grammar is None or not limit:
        return tree
    grammar.read(request.tokens, request.prompt_len)
    if tree.is_chain:
        return HostTree.of_paths([grammar.better_drafts(tree.tokens, limit)])
    # Branches that the grammar excludes are not accepted anyway.
    forced = grammar.better_drafts([], limit)
    return HostTree.of_paths([forced]) if len(forced) >= tree.depth else tree


def _tree_of(tokens: Any, parents: Any) -> HostTree:
    if parents is not None:
        return HostTree.of_parents(tokens, parents)
    tokens = list(tokens)
    is_chain = not any(isinstance(each, (list, tuple)) for each in tokens)
    return HostTree.of_paths([tokens] if is_chain else tokens)


def _by_depth(
    tokens: list[int], parents: list[int], depths: list[int]
) -> tuple[list[int], list[int]]:
    """The same tree with its nodes ordered by depth. depths: of the root, too."""
    ordered = sorted(range(1, len(depths)), key=depths.__getitem__)
    number = [0] * len(depths)
    for new, node in enumerate(ordered, 1):
        number[node] = new
    return [tokens[node - 1] for node in ordered], [number[parents[node - 1]] for node in ordered]


def _bits(parents: list[int]) -> list[int]:
    bits = [1]
    for node, parent in enumerate(parents, 1):
        bits.append(bits[parent] | 1 << node)
    if bits[-1] >> 63:
        bits[-1] -= 1 << 64
    return bits
