"""NGram drafts: what followed the same tokens earlier in the text (`resources/ngram_pool.py`,
`resources/ngram_tree_pool.py`)."""

from collections.abc import Callable
from typing import Any

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.ngram_pool import NGramPool
from tllm_spec.executor.speculative.drafting.drafter import Drafter


class NGramPoolManager(ResourceManager):
    """Drops a request's own n-grams when it ends."""

    def __init__(self, pool: NGramPool) -> None:
        self.pool = pool

    def free_resources(self, request: LlmRequest) -> None:
        self.pool.free(request.request_id)


class NGramDrafter(Drafter):
    """Asks a pool for every generating request that wants drafts."""

    def __init__(self, propose: Callable[[int, list[int], int, str | None], list[Any]]) -> None:
        """propose: the pool's, which returns a chain, or for a tree paths."""
        self._propose = propose

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            wanted = request.num_drafts_wanted
            request.py_draft_tokens = (
                self._propose(request.request_id, request.tokens, wanted, request.cache_salt)
                if wanted
                else []
            )
