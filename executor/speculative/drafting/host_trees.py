"""Drafts of trees that are made on the host: a drafter gives paths, or tokens and their parents."""

from collections.abc import Sequence

from tllm_spec.config.option_checks import shown
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.host_drafter import HostDrafter
from tllm_spec.executor.speculative.drafting.host_tree import HostTree, numbers_of, tree_of
from tllm_spec.executor.speculative.drafting.sent_drafts import improve
from tllm_spec.grammar.grammar_state import GrammarState
from tllm_spec.kernels.slots.accept import DraftTree


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
        self._found: list[HostTree] = []  # a round's trees, in the requests' order
        # To the dummy slot: compiles the kernel before the first request.
        self._send([len(slots.kv_lens) - 1], [0], [HostTree.of_paths([])])

    def _propose(self, batch: ScheduledBatch) -> None:
        for request in batch.generation_requests:
            request.py_draft_parents = None
        super()._propose(batch)

    def _are_valid(self, requests: list[LlmRequest]) -> bool:
        self._found.clear()
        return False  # each is checked, and becomes a `HostTree`

    def _check(self, request: LlmRequest) -> None:
        self.culprits = [request]
        tokens, parents = request.py_draft_tokens, request.py_draft_parents
        try:
            tree = tree_of(tokens, parents)
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
        trees = [tree.up_to(limit) for tree, limit in zip(self._found, wanted, strict=True)]
        improve(requests, trees, wanted, _better)
        depths = [tree.depth for tree in trees]
        for request, tree in zip(requests, trees, strict=True):
            request.py_draft_tokens, request.py_draft_parents = tree.tokens, None
            request.py_num_draft_tokens = tree.depth
        batch.made_draft_len = max(depths)
        batch.shape = self._slots.shapes.fitting(
            batch.made_draft_len, is_chain=all(tree.is_chain for tree in trees)
        )
        if batch.made_draft_len:
            # The requests' own tokens, since another token's embedding might be NaN.
            padding = [request.tokens[-1] for request in requests]
            self._send([request.slot for request in requests], padding, trees)

    def _send(self, slot_ids: list[int], padding: list[int], trees: Sequence[HostTree]) -> None:
        """Sends the trees to the slots in one copy, all as wide as a tree may be, so that one
        kernel is compiled. padding: of each request, the token after its tree."""
        batch, width = len(slot_ids), self._slots.shapes.longest.window
        sent = to_device(numbers_of(trees, slot_ids, width, padding), self._slots.device)
        sizes = [batch * size for size in (1, 1, width - 1, width, width, width)]
        slots, num_drafts, *rows = sent.split_with_sizes(sizes)
        tokens, parents, depths, bits = (each.view(batch, -1) for each in rows)
        drafts = DraftTree(tokens, num_drafts, parents=parents, depths=depths, bits=bits)
        self._slots.write(slots, drafts)


def _better(grammar: GrammarState, tree: HostTree, limit: int) -> HostTree:
    """A tree of depth `limit` at most. The grammar may know a better chain."""
    if tree.is_chain:
        return HostTree.of_paths([grammar.better_drafts(tree.tokens, limit)])
    # Branches that the grammar excludes are not accepted anyway.
    forced = grammar.better_drafts([], limit)
    return HostTree.of_paths([forced]) if len(forced) >= tree.depth else tree
