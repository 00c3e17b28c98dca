"""The KV cache of a draft model with pages of its own (two-model path).

The draft model follows the target by the lengths on the device. The host reserves pages by upper
bounds."""

from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD, KVCacheManager
from tllm_spec.executor.speculative.drafting.missed_tokens import Missed


class DraftKVManager(KVCacheManager):
    """Pages for the draft model, with the same life cycle as the target's.

    A request has no claim to draft pages: where they are short, it goes on without drafts."""

    def reserve(self, requests: list[LlmRequest], num_after: int, path: int) -> list[LlmRequest]:
        """Takes pages for the rounds in flight and one more, which writes `num_after` entries after
        the tokens before it and emits `path` tokens at most; returns the requests that have them.
        Called before every round, with the requests to draft for."""
        short = self.without_room(requests, num_after)
        if not short:
            return requests
        lacking = {r for r in short if not self.extend(r, r.num_tokens_bound + num_after)}
        num_more = num_after + ROUNDS_AHEAD * (1 + num_after)
        if self.cache.num_available >= len(requests) * (1 + self.pages_for(num_more)):
            self.take_ahead(requests, num_more, path + 1 + num_after)
        return [request for request in requests if request not in lacking]

    def missing_of_context(self, request: LlmRequest) -> Missed | None:
        """What the cache lacks of the context up to the end of this round's chunk; None where it
        lacks nothing, or there are no pages. A new request starts with its longest cached prefix,
        which may be longer than the target's."""
        if not self.holds(request):
            self.restore(request)
            request.draft_backlog = request.kv_len + 1 - self.start(request)
        start = max(self.num_shared(request), request.kv_len + 1 - request.draft_backlog)
        end = request.kv_len + request.context_chunk
        return Missed(request, start, end) if start < end and self.extend(request, end) else None
