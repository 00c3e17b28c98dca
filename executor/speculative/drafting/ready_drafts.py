"""Drafts that the round before has left in the slots."""

from operator import attrgetter

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import Drafter

_num_ready = attrgetter("num_drafts_ready")


class ReadyDrafts(Drafter):
    """The host knows how many drafts a request may have, and reads no more."""

    drafts_ahead = True

    def __init__(self, slots: SlotState) -> None:
        self._slots = slots
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
        if self._narrows and batch.made_draft_len and not batch.shape.is_ragged:
            self._narrow(batch)

    def _narrow(self, batch: ScheduledBatch) -> None:
        """Windows become as long as the longest drafts. On the CPU nothing has to be waited for,
        and every row costs time."""
        slot_ids = to_device(
            [request.slot for request in batch.generation_requests], self._slots.device
        )
        batch.made_draft_len = int(self._slots.num_real(slot_ids, batch.shape).max())
        batch.shape = self._slots.shapes.of(batch.made_draft_len)
