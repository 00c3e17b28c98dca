"""Drafts of trees that are made on the host: a drafter gives paths, or tokens and their parents."""

from collections.abc import Sequence

import numpy as np
import torch

from tllm_spec.config.option_checks import shown
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.grammar_work import GrammarWork
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.executor.speculative.drafting.host_tree import HostTree, numbers_of, tree_of
from tllm_spec.executor.speculative.drafting.tree_arrays import (
    UNLIMITED,
    Room,
    Rows,
    read_trees,
)
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.kernels.beam_pool import DraftTree

# From here on arrays are quicker than a `HostTree` for each request.
MIN_REQUESTS = 16


class HostTreeDrafter(HostDrafter):
    """A `HostDrafter` whose drafts are trees. Windows of a round have as many rows as its deepest
    tree may have, or, if no tree has a branch, as that chain has."""

    def __init__(
        self,
        inner: Drafter,
        resource_manager: ResourceManager | None,
        slots: SlotState,
        vocab_size: int,
        work: GrammarWork,
        room: Room = UNLIMITED,
    ) -> None:
        """room: where paths end; without it, a tree that is too large fails its request."""
        super().__init__(inner, resource_manager, slots, vocab_size, work)
        self._room = room
        self._rows: Rows | None = None  # a round's trees, if it has many requests
        self._found: list[HostTree] = []  # otherwise, in the requests' order
        # To the dummy slot: compiles the kernel before the first request.
        self._send([len(slots.kv_lens) - 1], [0], [HostTree.of_paths([])])

    def _propose(self, batch: ScheduledBatch) -> None:
        for request in batch.generation_requests:
            request.py_draft_parents = None
        super()._propose(batch)

    def _are_valid(self, requests: list[LlmRequest]) -> bool:
        self._found.clear()
        self._rows = None
        if len(requests) >= MIN_REQUESTS and not any(request.grammar for request in requests):
            self._rows = self._read(requests)
        return self._rows is not None  # otherwise each is checked, and becomes a `HostTree`

    def _read(self, requests: list[LlmRequest]) -> Rows | None:
        """None if anything is wrong."""
        proposals = [(request.py_draft_tokens, request.py_draft_parents) for request in requests]
        try:
            rows = read_trees(proposals, self._room)
        except (TypeError, ValueError, OverflowError):
            return None
        longest = self._slots.shapes.longest
        is_valid = (
            rows.counts.max() <= longest.num_nodes
            and rows.tree_depths.max() <= longest.depth
            and rows.tokens.max(initial=0) < self._vocab_size
        )
        return rows if is_valid else None

    def _check(self, request: LlmRequest) -> None:
        self.culprits = [request]
        tokens, parents = request.py_draft_tokens, request.py_draft_parents
        try:
            tree = tree_of(tokens, parents, self._room)
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
        requests, trees = batch.generation_requests, list[HostTree]()
        if self._rows is None:
            trees = [tree.up_to(limit) for tree, limit in zip(self._found, wanted, strict=True)]
            self._improve(requests, trees, wanted, _better)
            drafts, depths = [tree.tokens for tree in trees], [tree.depth for tree in trees]
        else:
            self._rows = self._rows.up_to(np.array(wanted))
            drafts, depths = self._rows.drafts, self._rows.tree_depths.tolist()
        for request, draft, depth in zip(requests, drafts, depths, strict=True):
            request.py_draft_tokens, request.py_draft_parents = draft, None
            request.py_num_draft_tokens = depth
        batch.num_steps = max(depths)
        batch.shape = self._slots.shapes.fitting(
            batch.num_steps, is_chain=list(map(len, drafts)) == depths
        )
        if batch.num_steps:
            # The requests' own tokens, since another token's embedding might be NaN.
            padding = [request.tokens[-1] for request in requests]
            self._send([request.slot for request in requests], padding, trees)

    def _send(self, slot_ids: list[int], padding: list[int], trees: Sequence[HostTree]) -> None:
        """Sends the trees, those of `_rows` if it is set, to the slots in one copy, all as wide as
        a tree may be, so that one kernel is compiled. padding: of each request, the token after its
        tree."""
        batch, width = len(slot_ids), self._slots.shapes.longest.window
        if self._rows is None:
            sent = to_device(numbers_of(trees, slot_ids, width, padding), self._slots.device)
        else:
            numbers = torch.from_numpy(self._rows.numbers(slot_ids, width, padding))
            sent = to_device(numbers, self._slots.device)
        sizes = [batch * size for size in (1, 1, width - 1, width, width, width)]
        slots, num_drafts, *rows = sent.split_with_sizes(sizes)
        tree = DraftTree(*(each.view(batch, -1) for each in rows))
        self._slots.write_tree(slots, tree, num_drafts)


def _better(grammar: GrammarState, tree: HostTree, limit: int) -> HostTree:
    """A tree of depth `limit` at most. The grammar may know a better chain."""
    if tree.is_chain:
        return HostTree.of_paths([grammar.better_drafts(tree.tokens, limit)])
    # Branches that the grammar excludes are not accepted anyway.
    forced = grammar.better_drafts([], limit)
    return HostTree.of_paths([forced]) if len(forced) >= tree.depth else tree
