"""Draft/Target: a small model in its own engine, with its own KV cache, proposes chains of tokens
(two-model path).

It reads prompts chunk by chunk with the target. A round drafts from the slots alone, before the
target's forward, so that the next round is launched before the host has read this one. When all K
drafts were accepted, the last of them is not in the draft cache yet, so every round starts by
re-reading the last two tokens. That is the same shape whatever was accepted, so a CUDA graph holds
all K steps.

A round without drafts for a request adds exactly one token to it. So the host knows what the draft
model has missed when drafting resumes (`LlmRequest.draft_lag`), and it has these tokens: only the
last one can be in flight, and the drafting round reads that from its slot."""

import logging
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.draft_engine import DraftModelEngine
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.graphs.eager_timing import TIMED_KV_LEN, eager_seconds
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.draft_kv import DraftKVManager
from tllm_spec.executor.speculative.drafting.drafter import Drafter
from tllm_spec.executor.speculative.drafting.missed_tokens import forwards_of
from tllm_spec.executor.speculative.drafting.round_end import RoundEnd
from tllm_spec.kernels.row_copies import gather_rows

logger = logging.getLogger(__name__)

_is_greedy, _slot = attrgetter("rules.is_greedy"), attrgetter("slot")


class ModelDrafter(Drafter, RoundEnd):
    """Drafts chains with a model in its own engine. A request whose draft cache cannot get pages is
    not drafted for in this round. The steps of a round are one graph launch where one of `graphs`
    fits, and eager otherwise."""

    def __init__(
        self,
        engine: DraftModelEngine,
        kv: DraftKVManager,
        slots: SlotState,
        groups: RowGroups,
        sampling: DraftSampling,
        max_num_tokens: int,
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._slots = slots
        self._groups = groups
        self._sampling = sampling
        self._max_num_tokens = max_num_tokens
        # Positions before the bonus token that a round of drafts may write again.
        self._lag = 1
        self.graphs: SlotGraphs[None] | None = None

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch, draft_len = scheduled_requests, scheduled_requests.draft_len
        wanting = [r for r in batch.generation_requests if _wants_drafts(r)] if draft_len else []
        batch.num_asked = draft_len if wanting else 0
        drafting = self._kv.reserve(wanting, self._num_after(batch.shape))
        self._read_missed(batch, drafting)
        if not drafting:
            batch.shape = NO_DRAFTS
            return
        batch.num_steps = draft_len
        for request in drafting:
            limit = request.draft_limit
            request.py_num_draft_tokens = draft_len if draft_len <= limit else limit
            request.draft_lag = self._lag
        self._kv.kv.flush()
        if not self._replay(drafting, batch.shape):
            self._draft(batch, self._groups.get(drafting, batch.shape.window))

    def launched(self, batch: ScheduledBatch) -> None:
        """The target has moved on by a chunk, or by one token where there were no drafts."""
        for request in batch.context_requests:
            request.draft_lag += request.context_chunk
        for request in batch.generation_requests:
            if not request.py_num_draft_tokens:
                request.draft_lag += 1

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        if not self._engine.may_be_captured:
            logger.warning("drafts are made without CUDA graphs: the draft engine allows none")
            keys = []
        self.graphs = rounds.for_same_slots(self._draft_from_slots)
        self.graphs.capture(key for key in keys if key.draft_len)

    def seconds_before(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        if not key.draft_len:
            return 0.0
        if self.graphs is not None and key in self.graphs:
            return self.graphs.seconds(key)
        slot_ids = torch.full((key.batch_size,), dummy_slot, device=device)

        def draft() -> torch.Tensor:
            self._draft_slots(slot_ids, key.shape, key.sampled, TIMED_KV_LEN)
            return self._slots.num_drafts[-1:]

        return eager_seconds(draft)

    def _draft_from_slots(self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool) -> None:
        """What a graph captures."""
        self._draft_slots(slot_ids, shape, sampled, self._engine.rows.max_len)

    def _draft_slots(
        self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool, max_kv_len: int
    ) -> None:
        """Writes drafts into the windows of the slots `[B]`, some of which may be the dummy slot.
        max_kv_len: bound of the KV lengths with drafts."""
        group = self._groups.of_slots(slot_ids, 1, sampled=sampled)
        longest = min(max_kv_len, self._engine.rows.max_len) - shape.depth
        self._steps(group, shape.depth, longest)

    def _read_missed(self, batch: ScheduledBatch, drafting: list[LlmRequest]) -> None:
        """Reads this round's context chunks, and what requests to draft for have missed."""
        late = [self._kv.missing(request) for request in drafting if self._is_late(request)]
        batch.catches_up = bool(late)
        of_contexts = [
            self._kv.missing_of_context(r) for r in batch.context_requests if r.draft_limit
        ]
        chunks = [missed for missed in of_contexts if missed and missed.start < missed.end]
        for forward in forwards_of(chunks + late, self._max_num_tokens):
            self._kv.kv.flush()
            self._engine.read(forward)
        for request, _, end in chunks:
            request.draft_lag = request.kv_len - end
        for request, _, end in chunks + late:
            # Drafting reads the last tokens again, and stored pages are shared.
            self._kv.kv.store(request, max(0, min(end, request.num_tokens - 1) + 1 - self._lag))

    def _num_after(self, shape: DraftShape) -> int:
        """KV entries that drafting may write after those of a request's tokens."""
        return shape.depth

    def _is_late(self, request: LlmRequest) -> bool:
        """Whether it has missed more than a round of drafts reads."""
        return request.draft_lag > 1

    def _replay(self, drafting: list[LlmRequest], shape: DraftShape) -> bool:
        if self.graphs is None:
            return False
        slots, is_sampled = list(map(_slot, drafting)), not all(map(_is_greedy, drafting))
        return self.graphs.run(slots, shape, is_sampled) is not None

    def _draft(self, batch: ScheduledBatch, group: RowGroup) -> None:
        longest = max(request.num_tokens_bound for request in group.requests)
        probs = self._steps(group, batch.draft_len, longest)
        if probs:
            stacked = self._sampling.spread(torch.stack(probs, dim=1))
            batch.draft_probs = self._spread(batch, group, stacked)

    def _steps(self, group: RowGroup, draft_len: int, longest: int) -> list[torch.Tensor]:
        """K steps on the device. Returns what each drew from, `[B, V]`, where rejection sampling
        needs it. The first step reads the last two tokens, the others the draft before. longest:
        bound of the group's tokens."""
        slots = self._slots
        positions = slots.positions(group.slots, draft_len)
        previous = gather_rows(slots.previous_token, group.slots)
        bonus = gather_rows(slots.window[:, 0], group.slots)
        # The dummy slot, which pads graphs, has no token before the bonus token.
        token_ids, first = torch.stack((previous, bonus), dim=1), (positions[0] - 1).clamp_min(0)
        drafts: list[torch.Tensor] = []
        probs: list[torch.Tensor] = []
        for step in range(draft_len):
            windows = Windows(group.slots, first, token_ids, longest + step)
            logits = self._engine.last_logits(windows)
            tokens, distribution = self._sampling.choose(group, step, logits, positions[1])
            drafts.append(tokens)
            if distribution is not None:
                probs.append(distribution)
            token_ids, first = tokens.unsqueeze(1), positions[step + 1]
        slots.write_drafts(group.slots, torch.stack(drafts, dim=1))
        return probs

    def _spread(self, batch: ScheduledBatch, group: RowGroup, probs: torch.Tensor) -> torch.Tensor:
        """Rows for all generating requests `[B, K, V]`; the rows of requests without drafts are
        never read."""
        if len(group.requests) == len(batch.generation_requests):
            return probs
        drafted = set(group.requests)
        rows = [
            index for index, request in enumerate(batch.generation_requests) if request in drafted
        ]
        spread = probs.new_zeros((len(batch.generation_requests), *probs.shape[1:]))
        return spread.index_copy_(0, to_device(rows, probs.device), probs)


def _wants_drafts(request: LlmRequest) -> bool:
    """Whatever the host has read of it: its last round may have more drafts than can be emitted."""
    return request.draft_limit > 0 and not request.draft_pause.is_on
