"""Runs drafters that work on the host (NGram, user-provided): checks their drafts, pads them, and
sends them to the slots."""

from operator import index

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.option_checks import shown


class HostDrafter(Drafter):
    """`culprits` are the requests whose drafts are being made, so that `blame` can name them after
    an exception.

    The inner drafter sees all requests at once. After it has raised, it gets one request at a time
    until a round succeeds, so that an exception fails only its own request."""

    def __init__(
        self,
        inner: Drafter,
        resource_manager: ResourceManager | None,
        slots: SlotState,
        vocab_size: int,
    ) -> None:
        self._inner = inner
        self._resource_manager = resource_manager
        self._slots = slots
        self._vocab_size = vocab_size
        self._one_at_a_time = False
        self.culprits: list[LlmRequest] = []

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch = scheduled_requests
        if not batch.draft_len or not batch.generation_requests:
            return
        placeholders = [request.py_draft_tokens for request in batch.generation_requests]
        wanted = [request.num_drafts_wanted for request in batch.generation_requests]
        batch.num_asked = max(wanted)
        self._propose(batch)
        for request, limit, untouched in zip(
            batch.generation_requests, wanted, placeholders, strict=True
        ):
            self._check(request, limit, untouched)
        self._pad(batch)

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
        groups = [[request] for request in requests] if self._one_at_a_time else [requests]
        for group in groups:
            self.culprits = group
            part = ScheduledBatch(generation_requests=group, draft_len=batch.draft_len)
            self._inner.prepare_draft_tokens(part, self._resource_manager)
        self.culprits, self._one_at_a_time = [], False

    def _check(self, request: LlmRequest, limit: int, untouched: list[int]) -> None:
        self.culprits = [request]
        if request.py_draft_tokens is untouched and not any(untouched):
            request.py_draft_tokens = []  # the drafter left the placeholders: it has no drafts
        try:
            drafts = list(map(index, request.py_draft_tokens))
        except TypeError as error:
            found = shown(request.py_draft_tokens)
            raise ValueError(
                f"the drafter proposed {found}, which are no token ids: {error}"
            ) from error
        request.py_draft_tokens = drafts
        longest = self._slots.max_draft_len
        if len(drafts) > longest:
            raise ValueError(
                f"the drafter proposed {len(drafts)} tokens; max_draft_len is {longest}"
            )
        if drafts and not 0 <= min(drafts) <= max(drafts) < self._vocab_size:
            raise ValueError(
                f"the drafter proposed {drafts}; the model has token ids 0 to "
                f"{self._vocab_size - 1}"
            )
        del drafts[limit:]  # the round may be shorter, or the request near its end
        self.culprits = []

    def _pad(self, batch: ScheduledBatch) -> None:
        """Pads all drafts to the longest one, since all windows of a round have one length.

        Padding is never accepted. It is the request's own last token: the forward reads it, and
        another token's embedding might be NaN."""
        requests = batch.generation_requests
        for request in requests:
            request.py_num_draft_tokens = len(request.py_draft_tokens)
        batch.draft_len = max(request.py_num_draft_tokens for request in requests)
        batch.num_steps = batch.draft_len
        if not batch.draft_len:
            return
        for request in requests:
            num_padding = batch.draft_len - request.py_num_draft_tokens
            request.py_draft_tokens += request.tokens[-1:] * num_padding
        device = self._slots.device
        slot_ids = to_device([request.slot for request in requests], device)
        self._slots.window[slot_ids, 1 : 1 + batch.draft_len] = to_device(
            [request.py_draft_tokens for request in requests], device
        )
        num_drafts = [request.py_num_draft_tokens for request in requests]
        self._slots.num_drafts[slot_ids] = to_device(num_drafts, device)
