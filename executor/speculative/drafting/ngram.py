"""NGram drafts: what followed the same tokens earlier in the text (`resources/ngram_pool.py`,
`resources/ngram_tree_pool.py`)."""

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.ngram_pool import NGramPool
from tllm_spec.executor.resources.ngram_tree_pool import NGramTreePool
from tllm_spec.executor.speculative.drafting.drafter import Drafter


class NGramPoolManager(ResourceManager):
    """Drops a request's own n-grams when it ends."""

    def __init__(self, pool: NGramPool) -> None:
        self.pool = pool

    def free_resources(self, request: LlmRequest) -> None:
        self.pool.free(request.request_id)


class NGramDrafter(Drafter):
    """Asks the pool for every generating request that wants drafts."""

    def __init__(self, pool: NGramPool) -> None:
        self._pool = pool

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            wanted = request.num_drafts_wanted
            request.py_draft_tokens = (
                self._pool.propose(request.request_id, request.tokens, wanted, request.cache_salt)
                if wanted
                else []
            )


class NGramTreeDrafter(Drafter):
    """As `NGramDrafter`, with several continuations of the last tokens."""

    def __init__(self, pool: NGramTreePool) -> None:
        self._pool = pool

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        for request in scheduled_requests.generation_requests:
            wanted = request.num_drafts_wanted
            paths = (
                self._pool.propose_paths(
                    request.request_id, request.tokens, wanted, request.cache_salt
                )
                if wanted
                else []
            )
            request.py_draft_tokens = paths  # type: ignore[assignment] # a list of paths
