"""Decides which requests run in a round, and with how many tokens.

It counts the token budget, slots and KV pages. Drafts are ordinary tokens here: each request
already has its `py_draft_tokens` placeholders. Pages are taken at once, so that what is scheduled
can run. Nothing here touches the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add, le, sub

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.request_queue import Shares, WaitingRequests
from tllm_spec.executor.resources.adapter_slots import AdapterSlots
from tllm_spec.executor.resources.interface import ResourceManager, SeqSlotManager
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD, KVCacheManager
from tllm_spec.lora_request import UnknownAdapter
from tllm_spec.request_errors import ContextLengthExceeded

# With `fair_preemption`, rounds between two requests that are given up for another client: what
# they have computed may have to be computed again.
FAIR_PREEMPTION_ROUNDS = 64


@dataclass(frozen=True)
class SchedulerLimits:
    """What the scheduler may give to requests."""

    max_num_tokens: int  # rows of one forward
    overshoot: int  # positions after its last token that a request may write to
    chunked_prefill: bool
    may_preempt: bool  # MAX_UTILIZATION; otherwise GUARANTEED_NO_EVICT
    by_priority: bool
    fair_preemption: bool = False  # needs may_preempt


class Scheduler:
    """Serves clients in turn, and each client's requests oldest first, or highest priority first.

    Running requests are scheduled before waiting ones join, and no request overtakes the one whose
    turn it is."""

    def __init__(
        self,
        limits: SchedulerLimits,
        slots: SeqSlotManager,
        kv: KVCacheManager,
        resources: Sequence[ResourceManager],
        adapters: AdapterSlots | None = None,
    ) -> None:
        """resources: every manager that a running request occupies, slots, kv and adapters
        included."""
        self.limits = limits
        num_tokens = kv.longest_request
        # Tokens, of prompt and output, that an empty cache has room for; None: any number.
        self.max_seq_len = None if num_tokens is None else num_tokens - limits.overshoot
        self.waiting = WaitingRequests(self._rank)
        self.running: list[LlmRequest] = []
        self.num_preemptions = 0
        self._num_fair_rounds = FAIR_PREEMPTION_ROUNDS  # since the last fair preemption
        self._slots = slots
        self._kv = kv
        self._resources = resources
        self._adapters = adapters

    def add(self, request: LlmRequest) -> None:
        """Queues the request. Raises ValueError when it can never run."""
        if not request.num_preemptions:
            self._check_can_ever_run(request)
            if self._adapters is not None:
                self._adapters.arrive(request)
            elif request.adapter is not None:
                raise UnknownAdapter(request.adapter)
        self.waiting.add(request)

    def remove(self, request: LlmRequest) -> None:
        """Takes a finished request out of its queue."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def generating(self) -> list[LlmRequest]:
        """The requests to decode next.

        Each round in flight adds at least one token; a request that is certain to reach
        `max_tokens` by that is left out."""
        state = RequestState.GENERATION
        return [
            request
            for request in self.running
            if request.state is state
            and not (
                len(request.tokens) - request.prompt_len + 1 >= request.max_tokens
                and request.tokens_in_flight
            )
        ]

    def may_be_done(self) -> bool:
        """Whether the rounds in flight may finish every running request, and none can join.

        Another round might then be empty, and would delay the next request's first token."""
        if self.waiting and self._slots.free:
            return False
        return all(
            request.tokens_in_flight
            and request.num_tokens_bound - request.prompt_len >= request.max_tokens
            for request in self.running
        )

    def schedule(
        self, generating: list[LlmRequest], shape: DraftShape, *, is_ragged: bool = False
    ) -> tuple[ScheduledBatch, list[LlmRequest]]:
        """The batch, and those of its requests that joined in this round.

        generating: the result of `generating`, each with placeholder drafts of this shape;
        is_ragged: of the batch."""
        batch = ScheduledBatch(generation_requests=generating, shape=shape, is_ragged=is_ragged)
        if self.limits.fair_preemption:
            self._preempt_fairly(batch)
        if is_ragged:
            plain = [request for request in generating if not request.draft_limit]
            self._take_pages(plain, NO_DRAFTS, batch)
            generating = [r for r in batch.generation_requests if r.draft_limit]
        self._take_pages(generating, shape, batch)
        budget = self.limits.max_num_tokens - batch.num_window_rows
        context = RequestState.CONTEXT
        for request in [request for request in self.running if request.state is context]:
            if request.state is context and budget > 0:  # it may have been preempted meanwhile
                budget -= self._schedule_context(request, budget, batch)
        return batch, self._admit_waiting(budget, batch)

    def _take_pages(
        self, requests: list[LlmRequest], shape: DraftShape, batch: ScheduledBatch
    ) -> None:
        """Takes pages for a round with drafts of this shape, for these requests of the batch."""
        num_more = self._kv.num_after(shape)
        short = self._kv.without_room(requests, num_more)
        for request in short:
            self._make_room(request, request.num_tokens_bound + num_more, batch)
        if short and not self.limits.may_preempt:  # these pages were reserved at admission
            num_ahead = num_more + ROUNDS_AHEAD * shape.path
            self._kv.take_ahead(requests, num_ahead, self.limits.overshoot)

    def _schedule_context(self, request: LlmRequest, budget: int, batch: ScheduledBatch) -> int:
        chunk = self._chunk_len(request, request.kv_len, budget)
        end = request.kv_len + chunk + self._kv.extra_kv_tokens
        if not chunk or not self._make_room(request, end, batch):
            return 0
        request.context_chunk = chunk
        batch.context_requests.append(request)
        return chunk

    def _chunk_len(self, request: LlmRequest, kv_len: int, budget: int) -> int:
        """Context tokens to run in this round after the first `kv_len`.

        0 if the rest does not fit and may not be cut. A preempted request is always cut, since its
        output may have made it longer than one round."""
        remaining = request.num_tokens - kv_len
        may_cut = self.limits.chunked_prefill or request.num_preemptions
        if remaining > budget and not may_cut:
            return 0
        return self._kv.chunk_len(request, kv_len, min(remaining, budget))

    def _make_room(self, request: LlmRequest, num_tokens: int, batch: ScheduledBatch) -> bool:
        """Takes pages for `num_tokens` tokens.

        Under MAX_UTILIZATION it preempts running requests for them, at the end `request` itself:
        then False."""
        while request.state is not RequestState.WAITING:
            if self._kv.extend(request, num_tokens):
                return True
            assert self.limits.may_preempt, "GUARANTEED_NO_EVICT admitted more than fits"
            self._preempt(self._last_of_largest_share(), batch)
        return False

    def _last_of_largest_share(self) -> LlmRequest:
        """The running request to preempt: the last one, with `fair_preemption` of the client that
        has most of them."""
        last = self.running[-1]
        if not self.limits.fair_preemption:
            return last
        lowest = [each for each in self.running if self._rank(each)[0] == self._rank(last)[0]]
        return Shares(self.running).largest(lowest)

    def _preempt_fairly(self, batch: ScheduledBatch) -> None:
        """Preempts a request of a client above its share, where one below its share could join
        then."""
        self._num_fair_rounds += 1
        if not (self.waiting and self.running) or self._num_fair_rounds < FAIR_PREEMPTION_ROUNDS:
            return
        request, victim = self._next_waiting(), self._last_of_largest_share()
        if (
            request is None
            or request.tokens_in_flight
            or self._rank(request)[0] > self._rank(victim)[0]
        ):
            return
        if not Shares(self.running).is_above(victim, request):
            return
        claims = self._claims(self.running)
        if self._slots.free and self._fits(request, claims):
            return
        if self._fits(request, list(map(sub, claims, self._kv.held(victim)))):
            self._num_fair_rounds = 0
            self._preempt(victim, batch)

    def _preempt(self, victim: LlmRequest, batch: ScheduledBatch) -> None:
        """See `preempt`; `batch` loses the request."""
        for scheduled in (batch.generation_requests, batch.context_requests):
            if victim in scheduled:
                scheduled.remove(victim)
        self.preempt(victim)

    def preempt(self, victim: LlmRequest) -> None:
        """Back to the queue with all its tokens. Its KV stays cached until it is evicted."""
        self.running.remove(victim)
        for manager in self._resources:
            manager.free_resources(victim)
        victim.state, victim.kv_len, victim.context_chunk = RequestState.WAITING, 0, 0
        victim.py_draft_tokens, victim.draft_backlog = [], 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self.add(victim)

    def _admit_waiting(self, budget: int, batch: ScheduledBatch) -> list[LlmRequest]:
        """Lets waiting requests join, up to the first one that does not fit. Those whose adapter
        finds no slot are overtaken."""
        admitted: list[LlmRequest] = []
        if not (self.waiting and self._slots.free and budget > 0):
            return admitted
        if self._adapters is not None:
            self._adapters.find_closed()
        reserved = self._claims(self.running)
        while self.waiting and self._slots.free and budget > 0:
            request = self._next_waiting()
            # A preempted request cannot be prefilled before its tokens in flight are known.
            if request is None or request.tokens_in_flight or not self._fits(request, reserved):
                break
            self._kv.restore(request)
            chunk = self._chunk_len(request, self._kv.match(request), budget)
            if not chunk:
                break
            self._join(request, chunk)
            reserved = list(map(add, reserved, self._claims([request])))
            batch.context_requests.append(request)
            admitted.append(request)
            budget -= chunk
        self.running.sort(key=self._rank)
        return admitted

    def _next_waiting(self) -> LlmRequest | None:
        """The request whose turn it is, of those that need no adapter or have a slot with it."""
        adapters = self._adapters
        if adapters is None:
            return self.waiting.next(self.running)
        while (request := self.waiting.next(self.running, adapters.closed)) is not None:
            if adapters.may_join(request):
                return request
        return None

    def _join(self, request: LlmRequest, chunk: int) -> None:
        """Gives the request a slot, its cached prefix, and pages for its first chunk."""
        self.waiting.take(request)
        self._slots.acquire(request)
        if self._adapters is not None:
            self._adapters.join(request)
        request.kv_len = self._kv.start(request)
        has_room = self._kv.extend(request, request.kv_len + chunk + self._kv.extra_kv_tokens)
        assert has_room, "a request that fits found no pages"
        request.state, request.context_chunk = RequestState.CONTEXT, chunk
        self.running.append(request)

    def _fits(self, request: LlmRequest, reserved: list[int]) -> bool:
        """Whether every group has pages for a waiting request, next to the `reserved` ones.

        GUARANTEED_NO_EVICT: for all tokens that it may ever have. MAX_UTILIZATION: for its tokens
        now."""
        may_preempt = self.limits.may_preempt
        num_tokens = request.num_tokens + self._kv.extra_kv_tokens
        if not may_preempt:
            num_tokens = self._last_token(request)
        needed = self._kv.new_pages_needed(request, num_tokens)
        available = self._kv.available(for_claims=not may_preempt)
        return all(map(le, map(add, needed, reserved), available))

    def _claims(self, requests: list[LlmRequest]) -> list[int]:
        """Pages of each group that running requests may come to need. MAX_UTILIZATION: one page of
        each, or a request that joins would be preempted again at once."""
        if self.limits.may_preempt:
            return [len(requests)] * len(self._kv.groups)
        return self._kv.claims(requests, self._last_token)

    def _last_token(self, request: LlmRequest) -> int:
        return request.prompt_len + request.max_tokens + self.limits.overshoot

    def _check_can_ever_run(self, request: LlmRequest) -> None:
        """Raises ValueError if not even an empty engine could run the request: whoever sends it has
        not heeded `RequestLimits`. Thread-safe."""
        prompt_len, longest = request.prompt_len, self.max_seq_len
        if longest is not None and prompt_len + request.max_tokens > longest:
            raise ContextLengthExceeded(
                f"prompt and max_tokens together are {prompt_len + request.max_tokens} tokens, and "
                f"the KV cache has room for {longest}; lower max_tokens or raise "
                "kv_cache_config.max_tokens"
            )
        most = self.limits.max_num_tokens
        if prompt_len > most and not self.limits.chunked_prefill:
            raise ContextLengthExceeded(
                f"the prompt has {prompt_len} tokens and max_num_tokens is {most}; raise "
                "max_num_tokens or set enable_chunked_prefill"
            )

    def _rank(self, request: LlmRequest) -> tuple[float, int]:
        return (-request.priority if self.limits.by_priority else 0.0, request.arrival)
