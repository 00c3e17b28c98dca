"""A draft head in an engine of its own (two-model path): what a round left behind is drafted from
when the next one is prepared.

The head's pages are the target's, so its KV of a round is written one round late; prefixes are
cached only as far as it has come (`LlmRequest.draft_kv_len`). It does not know how drafting works.

What a graph of the target left is drafted from by a graph that reads its results where they are.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.device_span import DeviceSpan
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.graph_drafter import GraphDrafter
from tllm_spec.executor.speculative.drafting.round_end import (
    ContextResult,
    RoundEnd,
    WindowResult,
)
from tllm_spec.executor.speculative.drafting.worker import DraftWorker
from tllm_spec.kernels.row_copies import gather_rows


@dataclass(frozen=True)
class _Pending:
    """A round that was not drafted from yet. `slots`: of its requests when it ran. `replayed`: the
    results of a graph, in the place of `windows`, and a bound of where its windows end."""

    contexts: ContextResult | None
    windows: WindowResult | None
    group: RowGroup
    slots: dict[LlmRequest, tuple[int, int]]
    replayed: tuple[SampledTokens, int] | None = None

    @property
    def width(self) -> int:
        """Of the windows; 0 without any."""
        if self.replayed is not None:
            return self.replayed[0].new_tokens.shape[1]
        return self.windows.width if self.windows is not None else 0

    @property
    def windowed(self) -> list[LlmRequest]:
        num_ended = 0
        if self.contexts is not None:
            num_ended = sum(following is None for following in self.contexts.following)
        return self.group.requests[num_ended:]


class DeferredDrafter(GraphDrafter, RoundEnd):
    """Requests that ended or were preempted since the round send their rows to the dummy slot. What
    rounds without drafts leave while none are wanted goes to the `backlog`."""

    reads_states_later = True

    def __init__(
        self,
        worker: DraftWorker,
        backlog: DraftBacklog,
        slots: SlotState,
        groups: RowGroups,
        dummy_slot: int,
        max_len: int,
    ) -> None:
        self._worker = worker
        self._backlog = backlog
        self._slots = slots
        self._groups = groups
        self._max_len = max_len
        self._dummy_slot = dummy_slot
        self._target: CudaGraphs | None = None
        self._pending: _Pending | None = None

    def after_contexts(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        first_tokens: torch.Tensor | None,
        windows: WindowResult | None,
        *,
        is_timed: bool,
    ) -> DeviceSpan | None:
        drafting = batch.last_chunk_requests
        if windows is not None:
            drafting = drafting + batch.generation_requests
        contexts = ContextResult.of(batch, chunks, first_tokens)
        group = self._groups.get(drafting, 1)
        places = _places(drafting + batch.context_requests)
        self._pending = _Pending(contexts, windows, group, places)
        return None

    def after_windows(self, batch: ScheduledBatch, windows: WindowResult) -> None:
        group = self._groups.get(batch.generation_requests, 1)
        self._pending = _Pending(None, windows, group, _places(batch.generation_requests))

    def after_replay(self, batch: ScheduledBatch, sampled: SampledTokens) -> None:
        group = self._groups.get(batch.generation_requests, 1)
        replayed = sampled, batch.max_kv_len
        self._pending = _Pending(None, None, group, _places(batch.generation_requests), replayed)

    def forget(self) -> None:
        self._pending = None

    def keys(self, of_rounds: list[GraphKey], asked: Iterable[GraphKey]) -> list[GraphKey]:
        """Each reads the results of the target's graph of the same key, so that the padding must be
        the same."""
        return of_rounds

    def run_round_before(self, key: GraphKey) -> None:
        assert self._target is not None
        self._target.replay([self._dummy_slot] * key.batch_size, key.draft_len, key.sampled)

    def capture_graphs(self, rounds: CudaGraphs, keys: Iterable[GraphKey]) -> None:
        self._target = rounds
        self._backlog.capture_graphs(rounds, keys)

    def draft_from_slots(self, slot_ids: torch.Tensor, draft_len: int, sampled: bool) -> None:
        assert self._target is not None
        result = self._target.result(GraphKey(len(slot_ids), draft_len, sampled))
        group = self._groups.of_slots(slot_ids, 1, sampled=sampled)
        windows = self._windows(group, result, self._max_len - draft_len)
        self._worker.draft(None, windows, group, draft_len)

    def draft_for_dummies(
        self, slot_ids: torch.Tensor, draft_len: int, sampled: bool, max_kv_len: int
    ) -> torch.Tensor:
        """Behind windows of as many drafts, all of them accepted."""
        group = self._groups.of_slots(slot_ids, 1, sampled=sampled)
        tokens = slot_ids.new_zeros((len(slot_ids), 1 + draft_len))
        result = SampledTokens(tokens, torch.full_like(slot_ids, 1 + draft_len))
        windows = self._windows(group, result, min(max_kv_len, self._max_len) - draft_len)
        self._worker.draft(None, windows, group, draft_len)
        return self._slots.num_drafts[-1:]

    def draft_probs(self, group: RowGroup, given: torch.Tensor | None) -> torch.Tensor | None:
        return self._worker.draft_probs(group, given)

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        batch = scheduled_requests
        if not any(request.num_drafts_wanted for request in batch.generation_requests):
            batch.draft_len = 0
        pending, self._pending = self._pending, None
        if pending is not None:
            self._draft_from(pending, batch.draft_len)
        for request in batch.generation_requests:
            request.py_num_draft_tokens = min(
                batch.draft_len, request.num_drafts_ready, request.draft_limit
            )
        batch.num_new_drafts = 0
        ready = max((request.num_drafts_ready for request in batch.generation_requests), default=0)
        batch.num_steps = batch.num_asked = min(batch.draft_len, ready)

    def _draft_from(self, pending: _Pending, num_drafts: int) -> None:
        alive = {request for request, place in pending.slots.items() if _place(request) == place}
        windowed = [request for request in pending.windowed if request in alive]
        is_put_off = pending.width == 1 and not num_drafts
        if not is_put_off:
            self._read_all([request for request in windowed if request.draft_backlog])
        if not self._replay(pending, alive, num_drafts):
            self._draft_eagerly(pending, alive, num_drafts)
        if is_put_off:
            self._note(windowed)
        for request in alive:
            request.draft_kv_len = request.kv_len - request.draft_backlog
            request.num_drafts_ready = num_drafts if request in pending.group.requests else 0
        for (
            request
        ) in windowed:  # where the host has not read the round it was a plain one: one position
            request.draft_kv_len += request.tokens_in_flight

    def _note(self, requests: list[LlmRequest]) -> None:
        """The round's position of each now waits, or is read where that fills a ring."""
        for request in requests:
            request.draft_backlog += 1
        if any(request.draft_backlog == self._backlog.length for request in requests):
            self._backlog.read(requests)

    def _read_all(self, requests: list[LlmRequest]) -> None:
        """What waits, before the round behind it is read, whose position counts because rings end
        where the slots end.
        Nobody stored it: whoever reads that round writes it properly."""
        for request in requests:
            request.draft_backlog += 1
        self._backlog.read(requests)

    def _replay(self, pending: _Pending, alive: set[LlmRequest], num_drafts: int) -> bool:
        """A round of a graph whose length is the next one's, too: all but the few where the draft
        length changes."""
        if self.graphs is None or pending.replayed is None:
            return False
        sampled, _ = pending.replayed
        if sampled.new_tokens.shape[1] != 1 + num_drafts:
            return False
        slots = [slot if r in alive else self._dummy_slot for r, (slot, _) in pending.slots.items()]
        return self.graphs.run(slots, num_drafts, pending.group.sampled is not None) is not None

    def _draft_eagerly(self, pending: _Pending, alive: set[LlmRequest], num_drafts: int) -> None:
        contexts, windows, group = pending.contexts, pending.windows, pending.group
        if pending.replayed is not None:
            windows = self._windows(group, *pending.replayed)
        if len(alive) < len(pending.slots):
            slots = [
                pending.slots[r][0] if r in alive else self._dummy_slot for r in group.requests
            ]
            group = replace(group, slots=to_device(slots, self._slots.device), memo={})
            if windows is not None:
                num_ended = len(group.requests) - len(windows.windows.slots)
                windows = replace(
                    windows, windows=replace(windows.windows, slots=group.slots[num_ended:])
                )
            if contexts is not None:
                chunks = [
                    chunk if request in alive else replace(chunk, slot=self._dummy_slot)
                    for chunk, request in zip(contexts.chunks, contexts.requests, strict=True)
                ]
                contexts = replace(contexts, chunks=chunks)
        self._worker.draft(contexts, windows, group, num_drafts)

    def _windows(self, group: RowGroup, sampled: SampledTokens, max_kv_len: int) -> WindowResult:
        """The windows that a graph verified: the slots have advanced by what was emitted. The dummy
        slot's have not, where it stands for a request that ended."""
        first = (gather_rows(self._slots.kv_lens, group.slots) - sampled.new_lens).clamp_min(0)
        return WindowResult(Windows(group.slots, first, sampled.new_tokens, max_kv_len), sampled)


def _places(requests: list[LlmRequest]) -> dict[LlmRequest, tuple[int, int]]:
    return {request: (request.slot, request.num_preemptions) for request in requests}


def _place(request: LlmRequest) -> tuple[int, int] | None:
    return None if request.is_finished else (request.slot, request.num_preemptions)
