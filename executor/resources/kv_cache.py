"""KV pages of running requests: the paged cache tied to requests, their slots and the device block
table.

One instance per model: the target has one, a separate draft model has its own with the same life
cycle."""

from collections.abc import Sequence
from dataclasses import dataclass

from tllm_spec.attention.kv_pool import KVPool
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.executor.resources.slot_state import BlockTable

# For how many rounds more than it needs a request is given room when there is a round in flight,
# and keeps it.
ROUNDS_AHEAD = 8


@dataclass(slots=True)
class _Row:
    """What the block-table row of a request holds, and the cache's live list of what it should
    hold."""

    pages: list[int]
    num_pages: int = 0
    version: int = -1


class KVCacheManager(ResourceManager):
    """Pages for every running request: taken by the scheduler, given back as drafts are rejected
    and requests end."""

    def __init__(
        self,
        cache: PagedCache,
        pool: KVPool,
        table: BlockTable,
        *,
        extra_kv_tokens: int = 0,
        draft_may_lag: bool = False,
    ) -> None:
        """extra_kv_tokens: places behind a round's own tokens that a drafter on the same pages
        writes to.
        draft_may_lag: it can write what it lacks whenever it is asked to, so that nobody waits for
        it."""
        self.cache = cache
        self.extra_kv_tokens = extra_kv_tokens
        self._draft_may_lag = draft_may_lag
        self.pool = pool
        self.table = table
        self._page_size = cache.page_size
        self._rows: dict[int, _Row] = {}
        # Most rounds have the requests of the one before, and neither take pages nor give any back:
        # what was found for all of them holds on. First the requests, and how many tokens each of
        # them has room for at least (below 0: not known); then the window and the requests that
        # have no page too many.
        self._roomy: Sequence[LlmRequest] = ()
        self._room = -1
        self._settled: tuple[int, Sequence[LlmRequest]] = (0, ())

    @property
    def num_available(self) -> int:
        return self.cache.num_available

    @property
    def num_usable(self) -> int:
        return self.cache.num_pages - 1

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def new_pages_needed(self, request: LlmRequest, num_tokens: int) -> int:
        """By how much starting the request and growing it to `num_tokens` tokens would lower
        `num_available`."""
        if not request.reuses_prefix:
            return self.pages_for(num_tokens)
        return self.cache.new_pages_needed(request.tokens, num_tokens)

    def match(self, request: LlmRequest) -> int:
        """Length of the cached prefix that `start` would give the request now, in tokens."""
        return self.cache.match(request.tokens) if request.reuses_prefix else 0

    def num_held(self, request: LlmRequest) -> int:
        return len(self._rows[request.request_id].pages)

    def holds(self, request: LlmRequest) -> bool:
        return request.request_id in self._rows

    def start(self, request: LlmRequest) -> int:
        """Begins a sequence with its longest cached prefix and returns that prefix's length in
        tokens."""
        cached_len = self.cache.add_sequence(
            request.request_id, request.tokens, reuse=request.reuses_prefix
        )
        self._rows[request.request_id] = _Row(self.cache.pages(request.request_id))
        if self._draft_may_lag:
            request.draft_backlog = cached_len - self.cache.whole_len(request.request_id)
        self._write_row(request)
        return cached_len

    def extend(self, request: LlmRequest, num_tokens: int) -> bool:
        """Room for the first `num_tokens` tokens; False, and nothing changed, when there are not
        enough pages."""
        if not self.cache.extend(request.request_id, num_tokens):
            return False
        self._write_row(request)
        return True

    def without_room(self, requests: Sequence[LlmRequest], num_more: int) -> list[LlmRequest]:
        """Those whose pages do not hold their tokens, the ones in flight at most, and `num_more`.
        It is asked before every round, which then adds 1 + `num_more` tokens at most."""
        if num_more <= self._room and requests == self._roomy:
            self._room -= 1 + num_more  # what the round may add
            return []
        rows, page_size = self._rows, self._page_size
        room = [
            len(rows[request.request_id].pages) * page_size
            - len(request.tokens)
            - request.tokens_in_flight
            for request in requests
        ]
        self._roomy, self._room = requests, min(room, default=-1) - (1 + num_more)
        return [request for request, free in zip(requests, room, strict=True) if free < num_more]

    def rewind(self, request: LlmRequest, num_tokens: int) -> None:
        """Gives back what lies wholly behind the first `num_tokens` tokens."""
        if self.cache.rewind(request.request_id, num_tokens):
            self._room = -1
            row = self._rows[request.request_id]  # its entries so far stay as they are
            row.num_pages, row.version = len(row.pages), self.cache.version(request.request_id)

    def store(self, request: LlmRequest, num_tokens: int) -> None:
        """The first `num_tokens` tokens' KV is final: other requests may reuse it from now on."""
        tokens, whole_len = self._determining(request, num_tokens)
        self.cache.store(request.request_id, tokens, whole_len)
        self._write_row(request)

    def release(self, request: LlmRequest, num_tokens: int) -> None:
        """Ends the sequence; the first `num_tokens` tokens stay cached for reuse. A failed request
        leaves nothing to
        reuse: what it wrote may not be numbers."""
        if self._rows.pop(request.request_id, None) is None:
            return
        tokens, whole_len = self._determining(request, num_tokens if request.error is None else 0)
        self.cache.free(request.request_id, tokens, whole_len)

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """The scheduler took the pages; the device learns of them in one copy."""
        self.table.flush()

    def update_resources(self, batch: ScheduledBatch) -> None:
        if self._settled != (batch.window, batch.generation_requests):
            self._give_back(batch)
        for request in batch.context_requests:
            if self.holds(request) and not request.is_finished:
                self.store(request, request.kv_len)

    def _give_back(self, batch: ScheduledBatch) -> None:
        rows, page_size, finished = self._rows, self._page_size, RequestState.FINISHED
        extra, next_rounds = self.extra_kv_tokens, (1 + ROUNDS_AHEAD) * batch.window
        for request in batch.generation_requests:
            row = rows.get(request.request_id)  # None: it was preempted since
            if row is None or request.state is finished:
                continue
            # The round in flight and a drafter on the same pages have tokens behind what the host
            # knows, and the rounds that are launched next would take again what is given back here.
            in_flight = request.tokens_in_flight
            kept = request.kv_len + extra + (in_flight + next_rounds if in_flight else 0)
            if kept <= (len(row.pages) - 1) * page_size:
                self.rewind(request, kept)
        self._settled = batch.window, batch.generation_requests

    def free_resources(self, request: LlmRequest) -> None:
        self.release(request, request.kv_len)

    def check_integrity(self) -> None:
        self.cache.check_integrity()

    def _determining(self, request: LlmRequest, num_tokens: int) -> tuple[list[int], int]:
        """The tokens that the KV of the first `num_tokens` tokens depends on, and how many of these
        the draft on the same pages has read; where it may not lag, both end there. Where the last
        one's next token is not known yet there is one less, and the cache leaves that position
        out."""
        whole_len = max(0, num_tokens - request.draft_lag)
        if not self._draft_may_lag:
            num_tokens = whole_len
        return request.tokens[: num_tokens + self.cache.lookahead], whole_len

    def _write_row(self, request: LlmRequest) -> None:
        """Brings the request's block-table row up to date; nothing to do in most rounds."""
        row, version = self._rows[request.request_id], self.cache.version(request.request_id)
        if row.version == version and row.num_pages == len(row.pages):
            return
        self._settled = 0, ()
        first_changed = row.num_pages if row.version == version else 0
        self.table.write(request.slot, row.pages, first_changed)
        row.num_pages, row.version = len(row.pages), version
