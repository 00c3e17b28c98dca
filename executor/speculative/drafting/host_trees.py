"""Drafts of trees that are made on the host: a drafter gives paths, or tokens and their parents."""

from array import array
from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.kernels.beam_pool import DraftTree
from tllm_spec.kernels.draft_layout import DraftLayout
from tllm_spec.option_checks import shown


class HostTree(NamedTuple):
    """Drafts by depth: the token of each, and its parent, 0 for the bonus token and n for the n-th
    draft."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[Any]]) -> "HostTree":
        """Equal beginnings of paths become one. Raises TypeError for what is no token id."""
        tree, nodes = cls([], []), dict[tuple[int, ...], int]()
        own = [tuple(map(index, path)) for path in paths]
        for depth in range(1, max(map(len, own), default=0) + 1):
            for path in own:
                if len(path) >= depth and path[:depth] not in nodes:
                    tree.parents.append(nodes.get(path[: depth - 1], 0))
                    tree.tokens.append(path[depth - 1])
                    nodes[path[:depth]] = len(tree.tokens)
        return tree

    @classmethod
    def of_parents(cls, tokens: Sequence[Any], parents: Sequence[Any]) -> "HostTree":
        """Raises TypeError for what is no number, ValueError for a parent that is not an earlier
        node."""
        if len(tokens) != len(parents):
            raise ValueError(f"{len(tokens)} tokens have {len(parents)} parents")
        DraftLayout.from_parents([-1, *map(index, parents)])
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*paths[parent], index(token)))
        return cls.of_paths(paths)

    @property
    def layout(self) -> DraftLayout:
        return DraftLayout.from_parents([-1, *self.parents])

    def up_to(self, depth: int) -> "HostTree":
        """Without deeper drafts."""
        number = sum(own <= depth for own in self.layout.depths) - 1
        return HostTree(self.tokens[:number], self.parents[:number])


class HostTreeDrafter(HostDrafter):
    """Windows of a round have as many rows as the deepest tree of the round may have."""

    def _are_valid(self, drafts: list[Any]) -> bool:
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
        longest, depth = self._slots.shapes.longest, tree.layout.max_depth
        if depth > longest.depth or len(tree.tokens) > longest.num_nodes:
            raise ValueError(
                f"the drafter proposed {len(tree.tokens)} tokens on paths of up to {depth}; "
                f"max_total_draft_tokens is {longest.num_nodes} and max_draft_len {longest.depth}"
            )
        if tree.tokens and not 0 <= min(tree.tokens) <= max(tree.tokens) < self._vocab_size:
            raise ValueError(
                f"the drafter proposed {tree.tokens}; the model has token ids 0 to "
                f"{self._vocab_size - 1}"
            )
        request.py_draft_tokens, request.py_draft_parents = tree.tokens, tree.parents
        self.culprits = []

    def _pad(self, batch: ScheduledBatch, wanted: list[int]) -> None:
        requests = batch.generation_requests
        trees = [
            HostTree(request.py_draft_tokens, request.py_draft_parents or []).up_to(depth)
            for request, depth in zip(requests, wanted, strict=True)
        ]
        depths = [tree.layout.max_depth for tree in trees]
        batch.num_steps = max(depths)
        batch.shape = self._slots.shapes.of(batch.num_steps)
        numbers: list[int] = []  # of slot, number of drafts, and the rows of the tree
        for request, tree, depth in zip(requests, trees, depths, strict=True):
            request.py_draft_tokens, request.py_draft_parents = tree.tokens, None
            request.py_num_draft_tokens = depth
            numbers += (request.slot, len(tree.tokens))
            numbers += _rows(tree, batch.shape.num_nodes, request.tokens[-1])
        if not batch.num_steps:
            return
        table = to_device(array("q", numbers), self._slots.device).view(len(requests), -1)
        nodes, width = batch.shape.num_nodes, batch.shape.window
        slot_ids, num_drafts, tokens, *rows = table.split_with_sizes((1, 1, nodes, *[width] * 3), 1)
        self._slots.write_tree(slot_ids[:, 0], DraftTree(tokens, *rows), num_drafts[:, 0])


def _tree_of(tokens: Any, parents: Any) -> HostTree:
    if parents is not None:
        return HostTree.of_parents(tokens, parents)
    tokens = list(tokens)
    is_chain = not any(isinstance(each, (list, tuple)) for each in tokens)
    return HostTree.of_paths([tokens] if is_chain else tokens)


def _rows(tree: HostTree, num_nodes: int, padding: int) -> list[int]:
    """Tokens, then the parents, depths and bits of the window's rows. Padding follows the root."""
    num_padding = num_nodes - len(tree.tokens)
    layout = DraftLayout.from_parents([-1, *tree.parents, *[0] * num_padding])
    return [
        *tree.tokens,
        *[padding] * num_padding,
        *layout.parents,
        *layout.depths,
        *layout.bits,
    ]
