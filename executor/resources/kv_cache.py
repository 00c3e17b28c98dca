"""KV pages of running requests: ties the paged cache to requests, slots and the block tables.

The target has one manager; a draft model with pages of its own has another, with the same life
cycle."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tllm_spec.attention.geometry import KVPool
from tllm_spec.attention.recurrent import RecurrentMemory
from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.request import LlmRequest, RequestState
from tllm_spec.executor.resources.interface import BlockTable, ResourceManager, SequencePages
from tllm_spec.executor.resources.paged_cache import PagedCache
from tllm_spec.kernels.attention.visible_keys import KeySpan

# While a round is in flight, a request takes and keeps pages for so many rounds ahead.
ROUNDS_AHEAD = 8


@dataclass(frozen=True)
class SpanRoom:
    """Tokens for which a request has pages beyond those that it sees, in a group with a span:
    `ahead` for the rounds to come, and `in_context` more before it generates."""

    page_size: int
    ahead: int
    in_context: int

    def most_pages(self, span: KeySpan, *, generates: bool) -> int:
        """How many pages a request holds at once. `slide` keeps up to one more page before the
        span, and the first and the last page may have other tokens, too."""
        num_tokens = span.size + self.ahead + (0 if generates else self.in_context)
        return -(-num_tokens // self.page_size) + 2


@dataclass(frozen=True)
class KVGroup:
    """The memory of a layer group: its pools, whose pages have the same numbers, and the block
    table."""

    pools: Sequence[KVPool]
    table: BlockTable


class KVCacheManager(ResourceManager):
    """Pages of every running request. The scheduler takes them; they are freed as drafts are
    rejected and requests end."""

    def __init__(
        self,
        cache: PagedCache,
        groups: Sequence[KVGroup],
        room: SpanRoom,
        *,
        extra_kv_tokens: int = 0,
        has_draft_layers: bool = False,
        states: RecurrentMemory | None = None,
    ) -> None:
        """groups: of the cache's groups. extra_kv_tokens: KV entries after those of a round's
        tokens that a drafter on the same pages writes. has_draft_layers: a draft network writes to
        the pages. states: of the slots, where the cache has snapshots of them."""
        self.cache = cache
        self._states = states
        self._has_draft_layers = has_draft_layers
        self.extra_kv_tokens = extra_kv_tokens
        # Tokens of each request in a round that has its pages and is not launched yet.
        self.scheduled_window = 0
        self.groups = groups
        self._room_of_span = room
        self._page_size = cache.page_size
        # The cache's live lists of the first group. Each group has as many pages of a request.
        self._rows: dict[int, SequencePages] = {}
        # Most rounds have the requests of the round before and neither take nor free pages, so what
        # was found for them is kept: how many more tokens each has room for at least (below 0: not
        # known), and the window and requests whose surplus pages were freed.
        self._roomy: Sequence[LlmRequest] = ()
        self._room = -1
        self._settled: tuple[DraftShape, Sequence[LlmRequest]] = (NO_DRAFTS, ())

    def state(self) -> dict[str, Any]:
        """Counts of pages as plain values, the type of the target's keys and values, and the bytes
        of a token on this rank, those of draft layers on the same pages included."""
        pools = [pool for group in self.groups for pool in group.pools]
        kv_format = pools[0].kv_format
        dtype = "fp8" if kv_format.scales else str(kv_format.dtype).removeprefix("torch.")
        num_bytes = sum(pool.data.nbytes // (pool.num_pages * pool.page_size) for pool in pools)
        return {**self.cache.state(), "dtype": dtype, "bytes_per_token": num_bytes}

    @property
    def longest_request(self) -> int | None:
        """Tokens that the pages of an empty cache have room for; None: any number."""
        own = [
            group.num_pages - 1
            for group in self.cache.groups
            if group.span is None or group.num_pages - 1 < self._most_pages(group.span)
        ]
        return min(own) * self._page_size if own else None

    def available(self, *, for_claims: bool = False) -> list[int]:
        """Pages of each group that can be taken now, or that `claims` are compared with."""
        return [
            own.num_pages - 1
            if for_claims and own.span is not None
            else self.cache.available(group)
            for group, own in enumerate(self.cache.groups)
        ]

    def claims(
        self, requests: Sequence[LlmRequest], last_token: Callable[[LlmRequest], int]
    ) -> list[int]:
        """Pages of each group that the requests may come to hold up to their last tokens: in
        addition to what they hold, or in total where they release pages, since pages that two
        requests share become free only when both release them."""
        claims = [0] * len(self.groups)
        for request in requests:
            end, held = self.cache.pages_for(last_token(request)), self.held(request)
            for group, own in enumerate(self.cache.groups):
                if own.span is None:
                    claims[group] += max(0, end - held[group])
                else:
                    most = self._most_pages(own.span, request)
                    claims[group] += max(held[group], min(end, most))
        return claims

    def _most_pages(self, span: KeySpan, request: LlmRequest | None = None) -> int:
        """Most pages in a group with a span; request: None for one that waits."""
        generates = request is not None and request.state is RequestState.GENERATION
        return self._room_of_span.most_pages(span, generates=generates)

    def num_after(self, shape: DraftShape) -> int:
        """KV entries that a round with such drafts may write after those of the tokens that the
        request may have before it: all nodes of a tree, or an accepted path and then what the
        drafter adds."""
        return max(shape.num_nodes, shape.depth + self.extra_kv_tokens)

    def new_pages_needed(self, request: LlmRequest, num_tokens: int) -> list[int]:
        """Pages of each group by which starting a request and growing it to `num_tokens` tokens
        would lower `available`, at most; where it releases pages, those that it holds at once."""
        tokens = request.tokens if request.reuses_prefix else ()
        needed = self.cache.new_pages_needed(tokens, num_tokens, request.salt)
        for group, own in enumerate(self.cache.groups):
            if own.span is not None:
                needed[group] = min(self.cache.pages_for(num_tokens), self._most_pages(own.span))
        return needed

    def restore(self, request: LlmRequest) -> None:
        """Brings pages of the request's prompt back from host memory."""
        if self.cache.host is not None and request.reuses_prefix:
            self.cache.restore(request.tokens, request.salt)

    def match(self, request: LlmRequest) -> int:
        """Length of the cached prefix that `start` would give the request now, in tokens."""
        if not request.reuses_prefix:
            return 0
        return self.cache.match(request.tokens, request.salt)

    def held(self, request: LlmRequest) -> list[int]:
        """How many pages of each group the request holds."""
        groups = self.cache.sequences[request.request_id].groups
        return [len(own.pages) - own.first for own in groups]

    def num_shared(self, request: LlmRequest) -> int:
        """Tokens in the request's cached pages."""
        return len(self.cache.sequences[request.request_id].nodes) * self._page_size

    def holds(self, request: LlmRequest) -> bool:
        return request.request_id in self._rows

    def start(self, request: LlmRequest) -> int:
        """Starts a sequence with its longest cached prefix; returns the prefix's length in
        tokens."""
        cached_len = self.cache.add_sequence(
            request.request_id, request.tokens, request.salt, reuse=request.reuses_prefix
        )
        self._rows[request.request_id] = self.cache.sequences[request.request_id].groups[0]
        self._write_rows(request)
        if self._states is not None and cached_len:
            node = self.cache.cached_end(request.request_id, cached_len)
            assert node is not None and self.cache.snapshots is not None
            self._states.restore(self.cache.snapshots.use(node), request.slot, cached_len)
        return cached_len

    def chunk_len(self, request: LlmRequest, first: int, most: int) -> int:
        """How many of the `most` context tokens after the first ones a round may read: up to where
        the states are to be copied, and only whole blocks of them. It may be 0."""
        if self._states is None:
            return most
        end, snapshots = first + most, self.cache.snapshots
        if snapshots is not None:
            end = min(end, first + snapshots.every - first % snapshots.every)
        return self._states.geometry.chunk_end(end, request.prompt_len) - first

    def _take_snapshots(self, batch: ScheduledBatch, states: RecurrentMemory) -> None:
        """Copies the states of prompts that have come to where a prefix may be reused up to.

        The chunk before was launched, and the device works in order, so its pages can be cached
        before it is read."""
        snapshots = self.cache.snapshots
        if snapshots is None:
            return
        for request in batch.context_requests:
            if request.kv_len == 0 or request.kv_len % snapshots.every:
                continue
            self.store(request, request.kv_len)
            node = self.cache.cached_end(request.request_id, request.kv_len)
            if node is not None and (number := snapshots.take(node)) is not None:
                states.save(request.slot, number, request.kv_len)

    def extend(self, request: LlmRequest, num_tokens: int) -> bool:
        """Takes pages for the first `num_tokens` tokens; False, and nothing changed, if there are
        too few."""
        if not self.cache.extend(request.request_id, num_tokens):
            return False
        self._write_rows(request)
        return True

    def take_ahead(self, requests: Sequence[LlmRequest], num_more: int, overshoot: int) -> None:
        """Takes the pages of the next rounds, of `num_more` tokens, for all requests at once, up to
        `overshoot` tokens after their last ones. When one request needs a page, all of them get
        theirs, so that most rounds take none and send no page numbers to the device."""
        for request in self.without_room(requests, num_more):
            if request.tokens_in_flight:  # without, they would be given back after this round
                last = request.prompt_len + request.max_tokens + overshoot
                self.extend(request, min(request.num_tokens_bound + num_more, last))

    def without_room(self, requests: Sequence[LlmRequest], num_more: int) -> list[LlmRequest]:
        """The requests that have no pages for `num_more` tokens after those they may have now,
        tokens in flight included. Called before every round, which then adds at most 1 + `num_more`
        tokens."""
        if num_more <= self._room and requests == self._roomy:
            self._room -= 1 + num_more
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
        """Frees the pages after those of the first `num_tokens` tokens."""
        if self.cache.rewind(request.request_id, num_tokens):
            self._room = -1

    def store(self, request: LlmRequest, num_tokens: int) -> None:
        """The KV of the first `num_tokens` tokens is final: other requests may reuse it now."""
        self.cache.store(request.request_id, self._determining(request, num_tokens))
        self._write_rows(request)

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        """Sends the pages that the scheduler took to the device, in one copy."""
        if self._states is not None:
            self._take_snapshots(batch, self._states)
        self.flush()

    def flush(self) -> None:
        """Sends the pages that requests took to the device, where it does not have them."""
        for group in self.groups:
            group.table.flush()

    def update_resources(self, batch: ScheduledBatch) -> None:
        self.give_back(batch)
        for request in batch.context_requests:
            if self.holds(request) and not request.is_finished:
                self.store(request, request.kv_len)
        if self.cache.has_spans:
            for request in batch.requests():
                if self.holds(request) and not request.is_finished:
                    self._slide(request)

    def _slide(self, request: LlmRequest) -> None:
        """Releases the pages that the request no longer sees.

        `kv_len` never falls again, and the rounds in flight have their rows after it. One page more
        is kept, for a hit that ends at the last full page."""
        self.cache.slide(request.request_id, max(0, request.kv_len - self._page_size))
        self._write_rows(request)

    def give_back(self, batch: ScheduledBatch) -> None:
        """Frees the pages of rejected drafts after the batch was read."""
        if self._settled == (batch.shape, batch.generation_requests):
            return
        rows, page_size, finished = self._rows, self._page_size, RequestState.FINISHED
        extra = self.extra_kv_tokens
        next_rounds = batch.shape.window + ROUNDS_AHEAD * batch.shape.path
        for request in batch.generation_requests:
            row = rows.get(request.request_id)  # None: preempted meanwhile, or no pages here
            if row is None or request.state is finished:
                continue
            # The round in flight and a drafter on the same pages write after kv_len, and the next
            # rounds would only take again what is freed here.
            in_flight = request.tokens_in_flight + self.scheduled_window
            kept = request.kv_len + extra + (in_flight + next_rounds if in_flight else 0)
            if kept <= (len(row.pages) - 1) * page_size:
                self.rewind(request, kept)
        self._settled = batch.shape, batch.generation_requests

    def free_resources(self, request: LlmRequest) -> None:
        """Ends the sequence; its first `kv_len` tokens stay cached for reuse.

        Nothing of a failed request does: its KV may hold NaN."""
        if self._rows.pop(request.request_id, None) is None:
            return
        num_tokens = request.kv_len if request.error is None else 0
        self.cache.free(request.request_id, self._determining(request, num_tokens))

    def check_integrity(self) -> None:
        self.cache.check_integrity()

    def _determining(self, request: LlmRequest, num_tokens: int) -> list[int]:
        """The tokens that the KV of the first `num_tokens` tokens depends on, as far as draft
        layers on the same pages have written theirs, too.

        Where the token after the last one is not known yet, the cache leaves its position out."""
        if self._has_draft_layers:  # the backlog ends with the token after `kv_len`, or later
            num_tokens -= max(0, request.draft_backlog - 1 + self.cache.lookahead)
        return request.tokens[: max(0, num_tokens) + self.cache.lookahead]

    def _write_rows(self, request: LlmRequest) -> None:
        """Brings the request's block-table rows up to date; nothing to do in most rounds."""
        rows = self.cache.sequences[request.request_id].groups
        for row, group in zip(rows, self.groups, strict=True):
            if row.num_known < len(row.pages):
                self._settled = NO_DRAFTS, ()
                group.table.write(request.slot, row.pages, row.num_known)
                row.num_known = len(row.pages)
