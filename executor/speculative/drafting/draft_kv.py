"""The KV cache of a draft model with pages of its own (two-model path).

The draft model follows the target by the lengths on the device. The host reserves pages by upper
bounds, and counts in `LlmRequest.draft_lag` what the cache may lack."""

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD, KVCacheManager
from tllm_spec.executor.speculative.drafting.missed_tokens import Missed


class DraftKVManager(ResourceManager):
    """Pages for the draft model, with the same life cycle as the target's.

    A request has no claim to draft pages: where they are short, it goes on without drafts."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv

    def reserve(self, requests: list[LlmRequest], num_drafts: int) -> list[LlmRequest]:
        """Takes pages for the rounds in flight and one more with `num_drafts` drafts; returns the
        requests that have them. Called before every round, with the requests to draft for."""
        kv = self.kv
        short = kv.without_room(requests, num_drafts)
        if not short:
            return requests
        lacking = {r for r in short if not kv.extend(r, r.num_tokens_bound + num_drafts)}
        self._take_ahead(requests, num_drafts)
        return [request for request in requests if request not in lacking]

    def missing_of_context(self, request: LlmRequest) -> Missed | None:
        """What the cache lacks of the context up to the end of this round's chunk; None where there
        are no pages for it. A new request starts with its longest cached prefix, which may be
        longer than the target's."""
        if not self.kv.holds(request):
            request.draft_lag = request.kv_len - self.kv.start(request)
        end = request.kv_len + request.context_chunk
        if not self.kv.extend(request, end):
            return None
        return Missed(request, request.kv_len - request.draft_lag, end)

    def missing(self, request: LlmRequest) -> Missed:
        """What the cache lacks of a generating request with a lag above 1.

        The latest rounds have added one token each, so the host knows the length on the device.
        The last two tokens are left to drafting. The lag is a bound, and may exceed the length."""
        length = request.num_tokens - 1 + (request.tokens_in_flight > 0)
        return Missed(request, max(0, length - request.draft_lag), length - 1)

    def update_resources(self, batch: ScheduledBatch) -> None:
        self.kv.give_back(batch)

    def free_resources(self, request: LlmRequest) -> None:
        """What the next round would write again is not stored: that round may be in flight."""
        self.kv.release(request, request.kv_len - request.draft_lag)
        request.draft_lag = 0

    def check_integrity(self) -> None:
        self.kv.check_integrity()

    def _take_ahead(self, requests: list[LlmRequest], num_drafts: int) -> None:
        """Takes the pages of the next rounds for all requests at once, where there are plenty, so
        that most rounds send no page numbers to the device."""
        kv, window = self.kv, 1 + num_drafts
        num_more = num_drafts + ROUNDS_AHEAD * window
        if kv.cache.num_available < len(requests) * (1 + kv.pages_for(num_more)):
            return
        for request in kv.without_room(requests, num_more):
            if request.tokens_in_flight:  # without, they would be given back after this round
                last = request.prompt_len + request.max_tokens + 2 * window
                kv.extend(request, min(request.num_tokens_bound + num_more, last))
