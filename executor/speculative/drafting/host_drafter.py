"""Runs the user's own drafter, which works on the host: checks their drafts, pads them, and
sends them to the slots."""

from array import array
from collections.abc import Sequence
from itertools import chain
from operator import index
from typing import Any

from tllm_spec.config.option_checks import shown
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import Drafter, improve, send_chains
from tllm_spec.grammar.thinking_budget import TextRules
from tllm_spec.kernels.drafts.draft_layout import HostTree
from tllm_spec.kernels.slots.accept import DraftTree


def tree_of(tokens: Any, parents: Any) -> HostTree:
    """The tree that a drafter proposes: a list of tokens with or without parents, or of paths.
    Raises TypeError and ValueError as `HostTree.of_parents`."""
    if parents is not None:
        return HostTree.of_parents(tokens, parents)
    tokens = list(tokens)
    is_chain = not any(isinstance(each, (list, tuple)) for each in tokens)
    return HostTree.of_paths([tokens] if is_chain else tokens)


def numbers_of(
    trees: Sequence[HostTree], slot_ids: Sequence[int], width: int, padding: Sequence[int]
) -> "array[int]":
    """What is sent: slots `[B]`, numbers of drafts `[B]`, tokens `[B, width - 1]`, parents, depths
    and bits `[B, width]`, one after the other. padding `[B]`: as `HostTree.padded` has it."""
    rows = [tree.padded(width, token) for tree, token in zip(trees, padding, strict=True)]
    numbers = (len(tree.tokens) for tree in trees)
    return array("q", chain(slot_ids, numbers, *chain.from_iterable(zip(*rows, strict=True))))


class HostDrafter(Drafter):
    """Runs a drafter on the host and checks its drafts. `culprits` are the requests whose drafts
    are being made, so that `blame` can name them after an exception.

    The inner drafter sees all requests at once. After it has raised, it gets one request at a time
    until a round succeeds, so that an exception fails only its own request.

    Where the configuration has trees, each draft is a `HostTree`. Windows of a round then have as
    many rows as its deepest tree may have, or, if no tree has a branch, as that chain has."""

    causes = "the drafter reads other tokens than request.tokens, or another tokenizer's ids"

    def __init__(
        self,
        inner: Drafter,
        resource_manager: ResourceManager | None,
        slots: SlotState,
        vocab_size: int,
    ) -> None:
        self._inner = inner
        self._resource_manager = resource_manager
        self.resources = () if resource_manager is None else (resource_manager,)
        self._slots = slots
        self._vocab_size = vocab_size
        self._one_at_a_time = False
        self.culprits: list[LlmRequest] = []
        if slots.shapes.has_trees:
            # To the dummy slot: compiles the kernel before the first request.
            self._send_trees([len(slots.kv_lens) - 1], [0], [HostTree.of_paths([])])

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch = scheduled_requests
        if not batch.shape.depth or not batch.generation_requests:
            return
        requests = batch.generation_requests
        placeholders = [request.py_draft_tokens for request in requests]
        wanted = [request.num_drafts_wanted for request in requests]
        batch.asked_draft_len = max(wanted)
        self._propose(batch)
        for request, untouched in zip(requests, placeholders, strict=True):
            if request.py_draft_tokens is untouched and not any(untouched):
                request.py_draft_tokens = []  # the drafter left the placeholders: it has no drafts
        if self._slots.shapes.has_trees:
            self._write_trees(batch, list(map(self._checked_tree, requests)), wanted)
            return
        if not self._are_valid(requests):
            for request in requests:
                request.py_draft_tokens = self._checked_chain(request)
        self._write_chains(batch, wanted)

    def blame(self) -> list[LlmRequest] | None:
        """After an exception: the requests that caused it; None if it was not raised here. Empty if
        it was one of several: the next round asks for one at a time."""
        culprits, self.culprits = self.culprits, []
        if not culprits:
            return None
        if len(culprits) > 1:
            self._one_at_a_time = True
            return []
        return culprits

    def _propose(self, batch: ScheduledBatch) -> None:
        requests = batch.generation_requests
        for request in requests if self._slots.shapes.has_trees else ():
            request.py_draft_parents = None
        groups = [[request] for request in requests] if self._one_at_a_time else [requests]
        for group in groups:
            self.culprits = group
            part = ScheduledBatch(generation_requests=group, shape=batch.shape)
            self._inner.prepare_draft_tokens(part, self._resource_manager)
        self.culprits, self._one_at_a_time = [], False

    def _are_valid(self, requests: list[LlmRequest]) -> bool:
        """Whether all chains of a round are lists of token ids and none is too long.

        `_checked_chain` says what is wrong, and accepts other sequences. One request at a time it
        takes several times as long."""
        drafts: list[Any] = [request.py_draft_tokens for request in requests]
        if set(map(type, drafts)) != {list}:
            return False
        tokens = list(chain.from_iterable(drafts))
        return not tokens or (
            set(map(type, tokens)) == {int}
            and 0 <= min(tokens) <= max(tokens) < self._vocab_size
            and max(map(len, drafts)) <= self._slots.max_draft_len
        )

    def _checked_chain(self, request: LlmRequest) -> list[int]:
        self.culprits = [request]
        try:
            drafts = list(map(index, request.py_draft_tokens))
        except TypeError as error:
            found = shown(request.py_draft_tokens)
            raise ValueError(
                f"the drafter proposed {found}, which are no token ids: {error}"
            ) from error
        longest = self._slots.max_draft_len
        if len(drafts) > longest:
            raise ValueError(
                f"the drafter proposed {len(drafts)} tokens; max_draft_len is {longest}"
            )
        return self._known(drafts)

    def _checked_tree(self, request: LlmRequest) -> HostTree:
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
        self._known(tree.tokens)
        return tree

    def _known(self, tokens: list[int]) -> list[int]:
        """The tokens of the only culprit, which are ids of the vocabulary."""
        if tokens and not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise ValueError(
                f"the drafter proposed {tokens}; the model has token ids 0 to "
                f"{self._vocab_size - 1}"
            )
        self.culprits = []
        return tokens

    def _write_chains(self, batch: ScheduledBatch, wanted: list[int]) -> None:
        """Cuts drafts to what their request wants (the round may be shorter, or the request near
        its end), and pads them to the longest one, since all windows of a round have one length."""
        requests = batch.generation_requests
        # Copies: a list that a drafter keeps must not be changed.
        drafts: list[list[int]] = [
            request.py_draft_tokens[:limit] for request, limit in zip(requests, wanted, strict=True)
        ]
        improve(requests, drafts, wanted, lambda rules, *chain: rules.better_drafts(*chain))
        draft_len = batch.made_draft_len = max(map(len, drafts))
        batch.shape = self._slots.shapes.of(draft_len)
        for request, draft in zip(requests, drafts, strict=True):
            request.py_draft_tokens, request.py_num_draft_tokens = draft, len(draft)
        if draft_len:
            send_chains(self._slots, requests, drafts, draft_len)

    def _write_trees(self, batch: ScheduledBatch, found: list[HostTree], wanted: list[int]) -> None:
        """As `_write_chains`. found: the trees, in the requests' order."""
        requests = batch.generation_requests
        trees = [tree.up_to(limit) for tree, limit in zip(found, wanted, strict=True)]
        improve(requests, trees, wanted, _better)
        for request, tree in zip(requests, trees, strict=True):
            request.py_draft_tokens, request.py_draft_parents = tree.tokens, None
            request.py_num_draft_tokens = tree.depth
        depth = batch.made_draft_len = max(tree.depth for tree in trees)
        is_chain = all(tree.is_chain for tree in trees)
        batch.shape = self._slots.shapes.fitting(depth, is_chain=is_chain)
        if depth:
            # The requests' own tokens, since another token's embedding might be NaN.
            padding = [request.tokens[-1] for request in requests]
            self._send_trees([request.slot for request in requests], padding, trees)

    def _send_trees(
        self, slot_ids: list[int], padding: list[int], trees: Sequence[HostTree]
    ) -> None:
        """Sends the trees to the slots in one copy, all as wide as a tree may be, so that one
        kernel is compiled. padding: of each request, the token after its tree."""
        batch, width = len(slot_ids), self._slots.shapes.longest.window
        sent = to_device(numbers_of(trees, slot_ids, width, padding), self._slots.device)
        sizes = [batch * size for size in (1, 1, width - 1, width, width, width)]
        slots, num_drafts, *rows = sent.split_with_sizes(sizes)
        tokens, parents, depths, bits = (each.view(batch, -1) for each in rows)
        drafts = DraftTree(tokens, num_drafts, parents=parents, depths=depths, bits=bits)
        self._slots.write(slots, drafts)


def _better(grammar: TextRules, tree: HostTree, limit: int) -> HostTree:
    """A tree of depth `limit` at most. The grammar may know a better chain."""
    if tree.is_chain:
        return HostTree.of_paths([grammar.better_drafts(tree.tokens, limit)])
    # Branches that the grammar excludes are not accepted anyway.
    forced = grammar.better_drafts([], limit)
    lacks_first = bool(forced) and forced[0] not in tree.tokens
    is_better = lacks_first or len(forced) >= tree.depth
    return HostTree.of_paths([forced]) if is_better else tree
