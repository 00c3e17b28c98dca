"""Runs the user's own drafter, which works on the host: checks their drafts, pads them, and
sends them to the slots."""

from itertools import chain
from operator import index
from typing import Any, TypeVar

from tllm_spec.config.option_checks import shown
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.sent_drafts import improve, send_chains
from tllm_spec.grammar.grammar_state import GrammarState

Drafts = TypeVar("Drafts")


class HostDrafter(Drafter):
    """Runs a drafter on the host and checks its drafts. `culprits` are the requests whose drafts
    are being made, so that `blame` can name them after an exception.

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
        requests = batch.generation_requests
        placeholders = [request.py_draft_tokens for request in requests]
        wanted = [request.num_drafts_wanted for request in requests]
        batch.asked_draft_len = max(wanted)
        self._propose(batch)
        for request, untouched in zip(requests, placeholders, strict=True):
            if request.py_draft_tokens is untouched and not any(untouched):
                request.py_draft_tokens = []  # the drafter left the placeholders: it has no drafts
        if not self._are_valid(requests):
            for request in requests:
                self._check(request)
        self._pad(batch, wanted)

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
            part = ScheduledBatch(generation_requests=group, shape=batch.shape)
            self._inner.prepare_draft_tokens(part, self._resource_manager)
        self.culprits, self._one_at_a_time = [], False

    def _are_valid(self, requests: list[LlmRequest]) -> bool:
        """Whether all drafts of a round are lists of token ids and none is too long.

        `_check` says what is wrong, and accepts other sequences. One request at a time it takes
        several times as long."""
        drafts: list[Any] = [request.py_draft_tokens for request in requests]
        if set(map(type, drafts)) != {list}:
            return False
        tokens = list(chain.from_iterable(drafts))
        return not tokens or (
            set(map(type, tokens)) == {int}
            and 0 <= min(tokens) <= max(tokens) < self._vocab_size
            and max(map(len, drafts)) <= self._slots.max_draft_len
        )

    def _check(self, request: LlmRequest) -> None:
        self.culprits = [request]
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
        self.culprits = []

    def _pad(self, batch: ScheduledBatch, wanted: list[int]) -> None:
        """Cuts drafts to what their request wants (the round may be shorter, or the request near
        its end), and pads them to the longest one, since all windows of a round have one length."""
        requests = batch.generation_requests
        # Copies: a list that a drafter keeps must not be changed.
        drafts: list[list[int]] = [
            request.py_draft_tokens[:limit] for request, limit in zip(requests, wanted, strict=True)
        ]
        improve(requests, drafts, wanted, GrammarState.better_drafts)
        draft_len = batch.made_draft_len = max(map(len, drafts))
        batch.shape = self._slots.shapes.of(draft_len)
        for request, draft in zip(requests, drafts, strict=True):
            request.py_draft_tokens, request.py_num_draft_tokens = draft, len(draft)
        if draft_len:
            send_chains(self._slots, requests, drafts, draft_len)
