"""A draft head in an engine of its own (two-model path): what a round left behind is drafted from when the next one is
prepared.

The head's pages are the target's, so its KV of a round is written one round late; prefixes are cached only as far as it
has come (`LlmRequest.draft_kv_len`). It does not know how drafting works.
"""

from dataclasses import dataclass, replace

import torch

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafter import Drafter
from tllm_spec.executor.speculative.worker import ContextResult, DraftWorker, RoundEnd, WindowResult
from tllm_spec.executor.transfer import to_device


@dataclass(frozen=True)
class _Pending:
    """A round that was not drafted from yet. `slots`: of its requests when it ran."""

    contexts: ContextResult | None
    windows: WindowResult | None
    group: RowGroup
    slots: dict[LlmRequest, tuple[int, int]]


class DeferredDrafter(Drafter, RoundEnd):
    """Requests that ended or were preempted since the round send their rows to the dummy slot."""

    in_graph = False

    def __init__(self, worker: DraftWorker, slots: SlotState, dummy_slot: int) -> None:
        self._worker = worker
        self._slots = slots
        self._dummy_slot = dummy_slot
        self._pending: _Pending | None = None

    def draft(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        num_drafts: int,
    ) -> None:
        requests = group.requests + (contexts.requests if contexts else [])
        slots = {request: (request.slot, request.num_preemptions) for request in requests}
        self._pending = _Pending(contexts, windows, group, slots)

    def draft_probs(self, slot_ids: torch.Tensor, num_drafts: int) -> torch.Tensor:
        return self._worker.draft_probs(slot_ids, num_drafts)

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch = scheduled_requests
        if not any(request.num_drafts_wanted for request in batch.generation_requests):
            batch.draft_len = 0
        pending, self._pending = self._pending, None
        if pending is not None:
            self._draft_from(pending, batch.draft_len)
        for request in batch.generation_requests:
            request.py_num_draft_tokens = min(batch.draft_len, request.num_drafts_ready, request.draft_limit)
        batch.num_new_drafts = 0

    def _draft_from(self, pending: _Pending, num_drafts: int) -> None:
        alive = {request for request, place in pending.slots.items() if _place(request) == place}
        contexts, windows, group = pending.contexts, pending.windows, pending.group
        if len(alive) < len(pending.slots):
            slots = [pending.slots[r][0] if r in alive else self._dummy_slot for r in group.requests]
            group = replace(group, slots=to_device(slots, self._slots.device), memo={})
            if windows is not None:
                num_ended = len(group.requests) - len(windows.windows.slots)
                windows = replace(windows, windows=replace(windows.windows, slots=group.slots[num_ended:]))
            if contexts is not None:
                chunks = [
                    chunk if request in alive else replace(chunk, slot=self._dummy_slot)
                    for chunk, request in zip(contexts.chunks, contexts.requests, strict=True)
                ]
                contexts = replace(contexts, chunks=chunks)
        self._worker.draft(contexts, windows, group, num_drafts)
        for request in alive:
            request.draft_kv_len = request.kv_len
            request.num_drafts_ready = num_drafts if request in group.requests else 0


def _place(request: LlmRequest) -> tuple[int, int] | None:
    return None if request.is_finished else (request.slot, request.num_preemptions)
