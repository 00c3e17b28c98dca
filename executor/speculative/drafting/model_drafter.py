"""Draft/Target: a small model in its own engine, with its own KV cache, proposes chains or trees of
tokens (two-model path).

It reads prompts chunk by chunk with the target. A round drafts from the slots alone, before the
target's forward, so that the next round is launched before the host has read this one. It begins
with the latest tokens, since the draft cache may lack them: after a full acceptance the last draft,
after a tree the accepted path (`LastAccepted`). So a round has the same shape whatever was
accepted, and a CUDA graph holds all K steps."""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.graphs.slot_graphs import TIMED_KV_LEN, GraphKey, SlotGraphs, eager_seconds
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.kv_cache import ROUNDS_AHEAD, KVCacheManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.draft_net import DraftNet
from tllm_spec.executor.speculative.drafting.drafter import Drafter, RoundResult, When, WindowResult
from tllm_spec.executor.speculative.drafting.drafting_steps import DraftSteps, with_masks
from tllm_spec.executor.speculative.drafting.network_drafter import Missed, missed_by, read_missed
from tllm_spec.executor.speculative.drafting.suffix_match import DraftChoice, copied
from tllm_spec.kernels.slots.accept import Drafts
from tllm_spec.kernels.slots.row_copies import gather_rows


class DraftKVManager(KVCacheManager):
    """Pages of a draft model's own, with the same life cycle as the target's. The draft model
    follows the target by the lengths on the device. The host reserves pages by upper bounds.

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
        if self.cache.num_available >= len(requests) * (1 + self.cache.pages_for(num_more)):
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


class LastAccepted:
    """What the target has emitted last, for a draft model with pages of its own that drafts trees
    or all tokens at once, or next to matches in the text.

    The accepted path is not in the draft cache where it belongs: beams, mask rows or other drafts
    were. So a round of drafts first reads what the target emitted in the round before: `_tokens`
    `[S, D + 2]`, the token before each slot's new tokens, then these, of which `_lens` `[S]` are
    valid."""

    def __init__(self, slots: SlotState) -> None:
        self._slots, self.width = slots, slots.max_draft_len + 2
        size = len(slots.kv_lens), self.width
        self._tokens = torch.zeros(size, dtype=torch.int64, device=slots.device)
        self._lens = torch.ones(size[0], dtype=torch.int64, device=slots.device)

    def start(self, slot_ids: torch.Tensor) -> None:
        """Called when the contexts of these slots have ended."""
        self._tokens[slot_ids, 0] = self._slots.previous_token[slot_ids]
        self._tokens[slot_ids, 1] = self._slots.window[slot_ids, 0]
        self._lens.index_fill_(0, slot_ids, 1)

    def keep(self, result: WindowResult) -> None:
        slot_ids, sampled = result.windows.slots, result.sampled
        before = result.windows.token_ids[:, :1]
        tokens = torch.cat((before, sampled.new_tokens.clamp_min(0)), dim=1)
        self._tokens[slot_ids, : tokens.shape[1]] = tokens
        self._lens[slot_ids] = sampled.new_lens

    def num_tokens(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """How many tokens of the windows of slots `[B]` are valid, `[B]`."""
        return gather_rows(self._lens, slot_ids) + 1

    def windows(
        self, slot_ids: torch.Tensor, kv_lens: torch.Tensor, max_kv_len: int
    ) -> tuple[Windows, torch.Tensor]:
        """The windows of slots `[B]`, and the rows of the last tokens, `[B]`."""
        lens = gather_rows(self._lens, slot_ids)
        # The dummy slot, which pads graphs, has no token before them.
        first = (kv_lens - lens).clamp_min_(0)
        windows = Windows(slot_ids, first, gather_rows(self._tokens, slot_ids), max_kv_len)
        rows = torch.arange(0, len(slot_ids) * self.width, self.width, device=lens.device) + lens
        return windows, rows


logger = logging.getLogger(__name__)

_is_greedy, _slot = attrgetter("rules.is_greedy"), attrgetter("slot")


class ModelDrafter(Drafter):
    """Drafts with a model in its own engine. A request whose draft cache cannot get pages is not
    drafted for in this round. The steps of a round are one graph launch where one of `graphs` fits,
    and eager otherwise. choice: adds drafts of matches in the text; None: there are none."""

    when = When.DEVICE

    def __init__(
        self,
        net: DraftNet,
        kv: DraftKVManager,
        slots: SlotState,
        groups: RowGroups,
        sampling: DraftSampling,
        max_num_tokens: int,
        choice: DraftChoice | None = None,
    ) -> None:
        self._net = net
        self._kv = kv
        self._slots = slots
        self._groups = groups
        self._max_num_tokens = max_num_tokens
        self._choice = choice
        self._steps = DraftSteps(net, slots, sampling, choice)
        # Whether accepted tokens may be others than the draft cache has.
        rereads = choice is not None or slots.shapes.has_trees or net.masks is not None
        self._accepted = LastAccepted(slots) if rereads else None
        # Tokens that a round of drafts reads before it drafts, at most.
        self._num_latest = 2 if self._accepted is None else self._accepted.width
        self.graphs: SlotGraphs[None] | None = None

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch, draft_len = scheduled_requests, scheduled_requests.shape.depth
        wanting = [r for r in batch.generation_requests if _wants_drafts(r)] if draft_len else []
        batch.asked_draft_len = draft_len if wanting else 0
        drafting = self._kv.reserve(wanting, self._num_after(batch.shape), batch.shape.path)
        self._catch_up(batch, drafting)
        if not drafting:
            batch.shape = NO_DRAFTS
            return
        batch.made_draft_len = draft_len
        for request in drafting:
            limit = request.draft_limit
            request.py_num_draft_tokens = draft_len if draft_len <= limit else limit
        slots, greedy, graphs = map(_slot, drafting), map(_is_greedy, drafting), self.graphs
        if graphs is None or graphs.run(list(slots), batch.shape, not all(greedy)) is None:
            longest = max(request.num_tokens_bound for request in drafting)
            self._draft(self._groups.get(drafting, 1), batch.shape, longest)

    def launched(self, batch: ScheduledBatch) -> None:
        """Counts what the target has read and the draft model has not: a chunk, or one token where
        there were no drafts."""
        for request in batch.context_requests:
            request.draft_backlog += request.context_chunk
        for request in batch.generation_requests:
            if request.py_num_draft_tokens:
                request.draft_backlog = self._num_latest
            else:
                request.draft_backlog += 1

    def propose(self, seen: RoundResult, group: RowGroup, shape: DraftShape) -> None:
        """Keeps what the target emitted, for the drafts before the next forward."""
        contexts, windows = seen
        if self._accepted is not None:
            if contexts is not None and contexts.first_tokens is not None:
                self._accepted.start(group.slots)
            if windows is not None:
                self._accepted.keep(windows)
        if self._choice is not None:
            self._choice.read(seen, group)

    def draft_probs(self, group: RowGroup) -> torch.Tensor | None:
        return self._steps.probs(group)

    def state(self) -> Mapping[str, Any]:
        return {} if self._choice is None else self._choice.state()

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        if not self._net.may_be_captured:
            logger.warning("drafts are made without CUDA graphs: the draft engine allows none")
            keys = []
        draft = partial(self._draft_slots, max_kv_len=self._net.rows.max_len)
        self.graphs = rounds.for_same_slots(draft)
        self.graphs.capture(key for key in keys if key.shape.depth)

    def seconds_before(self, key: GraphKey) -> float:
        if not key.shape.depth:
            return 0.0
        if self.graphs is not None and key in self.graphs:
            return self.graphs.seconds(key)
        slot_ids = self._slots.dummies(key.batch_size)

        def draft() -> torch.Tensor:
            self._draft_slots(slot_ids, key.shape, key.sampled, TIMED_KV_LEN)
            return self._slots.num_drafts[-1:]

        return eager_seconds(draft)

    def _catch_up(self, batch: ScheduledBatch, drafting: list[LlmRequest]) -> None:
        """Reads this round's context chunks, and what requests to draft for have missed."""
        late = [r for r in drafting if r.draft_backlog > self._num_latest]
        batch.catches_up = bool(late)
        of_contexts = [
            self._kv.missing_of_context(r) for r in batch.context_requests if r.draft_limit
        ]
        chunks = [missed for missed in of_contexts if missed is not None]
        self._kv.flush()
        # After a round without drafts two tokens are left to drafting. Shared pages were read.
        others = [missed_by(r, 2, self._kv.num_shared(r)) for r in late]
        read_missed(self._net, chunks + others, self._max_num_tokens)
        for request, _, _ in chunks:
            is_last = request.is_last_context_chunk
            request.draft_backlog = (self._num_latest if is_last else 1) - request.context_chunk

    def _num_after(self, shape: DraftShape) -> int:
        """KV entries that drafting may write after those of a request's tokens."""
        if self._accepted is None:
            return shape.depth
        if self._net.masks is not None:
            return self._accepted.width - 2 + shape.depth - 1  # one token at least is emitted
        return max(shape.num_read, self._accepted.width - 1) + 1

    def _draft_slots(
        self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool, max_kv_len: int
    ) -> None:
        """What a graph captures: drafts for slots `[B]`, some of which may be the dummy slot.
        max_kv_len: bound of the KV lengths with drafts."""
        group = self._groups.of_slots(slot_ids, 1, sampled=sampled)
        self._draft(group, shape, min(max_kv_len, self._net.rows.max_len) - shape.depth)

    def _draft(self, group: RowGroup, shape: DraftShape, longest: int) -> None:
        """Writes drafts into the windows of the group's slots. longest: bound of their tokens."""
        kv_lens = gather_rows(self._slots.kv_lens, group.slots)
        if self._net.masks is not None:
            states = self._read_with_masks(group.slots, kv_lens, longest, shape.depth)
        else:
            states = self._read_latest(group.slots, kv_lens, longest)
        if shape.is_copied:
            drafts: Drafts = copied(self._choice, group, shape)
        else:
            drafts = self._steps.draft(group, shape, kv_lens, states, longest)
        self._slots.write(group.slots, drafts)

    def _read_with_masks(
        self, slot_ids: torch.Tensor, kv_lens: torch.Tensor, longest: int, num_drafts: int
    ) -> torch.Tensor:
        """Reads the latest tokens of slots `[B]`, with mask rows after them. Returns the states
        that drafts come from, `[num_drafts * B, H]`."""
        masks, accepted, rows = self._net.masks, self._accepted, self._net.rows
        assert masks is not None and accepted is not None
        bound = min(longest + accepted.width, rows.max_len - num_drafts + 1)
        windows, _ = accepted.windows(slot_ids, kv_lens, bound)
        num_read = accepted.num_tokens(slot_ids)
        windows, _, wanted = with_masks(windows, None, num_read, num_drafts, masks)
        return self._net.forward([], windows, None, wanted=wanted)

    def _read_latest(
        self, slot_ids: torch.Tensor, kv_lens: torch.Tensor, longest: int
    ) -> torch.Tensor:
        """Reads the latest tokens of slots `[B]`. Returns the states after the last ones, `[B,
        H]`."""
        slots = self._slots
        if self._accepted is not None:
            bound = min(longest + self._accepted.width, self._net.rows.max_len)
            windows, rows = self._accepted.windows(slot_ids, kv_lens, bound)
            return gather_rows(self._net.forward([], windows, None), rows)
        previous = gather_rows(slots.previous_token, slot_ids)
        token_ids = torch.stack((previous, gather_rows(slots.window[:, 0], slot_ids)), dim=1)
        # The dummy slot, which pads graphs, has no token before the bonus token.
        first = (kv_lens - 1).clamp_min_(0)
        return self._net.after_last(Windows(slot_ids, first, token_ids, longest))


def _wants_drafts(request: LlmRequest) -> bool:
    """Whether the request takes drafts, however much of it the host has read: its last round may
    have more drafts than can be emitted."""
    return request.draft_limit > 0 and not request.draft_pause.rounds_left
