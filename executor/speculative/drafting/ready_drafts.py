"""Drafts that the round before has left in the slots, or that a grammar forces."""

from collections.abc import Sequence
from operator import attrgetter

import torch

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost, to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.sent_drafts import improve, send_chains
from tllm_spec.grammar.grammar_state import GrammarState

_num_ready, _slot = attrgetter("num_drafts_ready"), attrgetter("slot")


class ReadyDrafts(Drafter):
    """The host knows how many drafts a request may have, and reads no more, but for requests with
    grammars whose tokens it has read. knows_forced_text: False: their drafts stay as they are."""

    drafts_ahead = True

    def __init__(self, slots: SlotState, *, knows_forced_text: bool = False) -> None:
        self._slots, self.knows_forced_text = slots, knows_forced_text
        self._narrows = slots.counts_drafts and slots.device.type == "cpu"

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch, draft_len = scheduled_requests, scheduled_requests.draft_len
        longest = max(map(_num_ready, batch.generation_requests), default=0)
        batch.made_draft_len = batch.asked_draft_len = min(draft_len, longest)
        for request in batch.generation_requests:
            ready, limit = request.num_drafts_ready, request.draft_limit
            # `min` of three numbers would take longer than the rest of the loop, and most requests
            # have all drafts.
            request.py_num_draft_tokens = (
                draft_len if ready >= draft_len <= limit else min(ready, limit)
            )
        if self.knows_forced_text and draft_len:
            self._improve(batch)
        if self._narrows and batch.made_draft_len and not batch.shape.is_ragged:
            self._narrow(batch)

    def _improve(self, batch: ScheduledBatch) -> None:
        """A tree is dropped where the grammar forces as many tokens as it is deep."""
        guided = [
            request
            for request in batch.generation_requests
            if request.grammar is not None
            and not request.tokens_in_flight
            and request.num_drafts_wanted
        ]
        if not guided:
            return
        slot_ids = self._slot_ids(guided)
        windows = self._slots.window[:, 1 : 1 + batch.draft_len].index_select(0, slot_ids)
        sent = ToHost([windows, self._slots.num_real(slot_ids, batch.shape)])
        limits = [request.num_drafts_wanted for request in guided]
        tokens, numbers = (each.tolist() for each in sent.wait())
        numbers = list(map(min, numbers, limits))
        is_tree = batch.shape.is_tree
        drafts: list[list[int]] = [
            [] if is_tree else row[:number] for row, number in zip(tokens, numbers, strict=True)
        ]
        improve(guided, drafts, limits, GrammarState.better_drafts)
        better = [
            (request, draft)
            for request, draft, number in zip(guided, drafts, numbers, strict=True)
            if not is_tree or len(draft) >= max(number, 1)
        ]
        for request, draft in better:
            request.py_num_draft_tokens = len(draft)
            batch.made_draft_len = max(batch.made_draft_len, len(draft))
        if better:
            requests, chains = zip(*better, strict=True)
            send_chains(self._slots, requests, chains, batch.draft_len)

    def _narrow(self, batch: ScheduledBatch) -> None:
        """Windows become as long as the longest drafts. On the CPU nothing has to be waited for,
        and every row costs time."""
        slot_ids = self._slot_ids(batch.generation_requests)
        batch.made_draft_len = int(self._slots.num_real(slot_ids, batch.shape).max())
        narrow = self._slots.shapes.of(batch.made_draft_len)
        if narrow.num_nodes <= batch.shape.num_nodes:  # there are pages for no more
            batch.shape = narrow

    def _slot_ids(self, requests: Sequence[LlmRequest]) -> torch.Tensor:
        return to_device(list(map(_slot, requests)), self._slots.device)
