"""Sends the target's hidden states of some requests to the host, round after round
(`record_hidden_states`)."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost, to_device
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.round_end import ContextResult, RoundEnd, WindowResult


class StateRecorder(RoundEnd):
    """A drafter's part `inner` of the rounds, and the copies of what the forward has captured in
    `spec` for requests with `text_states`. A tail, which may be in a graph, only notes which rows
    were accepted; the copies are launched after it."""

    def __init__(self, inner: RoundEnd, spec: SpecMetadata, slots: SlotState) -> None:
        self._inner, self._spec = inner, spec
        self.splits_rounds = inner.splits_rounds
        self.reads_whole_windows = inner.reads_whole_windows
        num_slots, path = len(slots.kv_lens), slots.shapes.longest.path
        # The accepted rows of each request in the latest tail, [B, D+1], and how many there are.
        self._rows = torch.zeros(num_slots * path, dtype=torch.int64, device=slots.device)
        self._lens = torch.zeros(num_slots, dtype=torch.int64, device=slots.device)
        self._has_windows = False  # whether the windows of this round were sent

    def prepare(self, batch: ScheduledBatch) -> None:
        self._has_windows = False
        self._inner.prepare(batch)

    def after_contexts(
        self, batch: ScheduledBatch, contexts: ContextResult, windows: WindowResult | None
    ) -> None:
        self._inner.after_contexts(batch, contexts, windows)
        self._send_chunks(contexts)
        if windows is not None:
            self._note(windows, sum(len(chunk.tokens) for chunk in contexts.chunks))
            self._send_windows(batch)

    def tail(self, group: RowGroup, windows: WindowResult, shape: DraftShape) -> None:
        self._inner.tail(group, windows, shape)
        self._note(windows, 0)

    def launched(self, batch: ScheduledBatch) -> None:
        self._inner.launched(batch)
        if batch.generation_requests and not self._has_windows:
            self._send_windows(batch)

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        self._inner.capture_graphs(rounds, keys)

    def seconds_before(self, key: GraphKey, dummy_slot: int, device: torch.device) -> float:
        return self._inner.seconds_before(key, dummy_slot, device)

    def draft_probs(self, group: RowGroup) -> torch.Tensor | None:
        return self._inner.draft_probs(group)

    def state(self) -> Mapping[str, Any]:
        return self._inner.state()

    def _send_chunks(self, contexts: ContextResult) -> None:
        first, rows = 0, list[int]()
        found: list[tuple[LlmRequest, int]] = []
        for request, chunk in zip(contexts.requests, contexts.chunks, strict=True):
            number = len(chunk.tokens)
            if _is_recorded(request):
                found.append((request, number))
                rows += range(first, first + number)
            first += number
        if not rows:
            return
        buffer = self._spec.buffer
        sent = ToHost([buffer.index_select(0, to_device(rows, buffer.device))])
        first = 0
        for request, number in found:
            assert request.text_states is not None
            request.text_states.add_chunk(sent, first, number)
            first += number

    def _note(self, windows: WindowResult, num_before: int) -> None:
        """Device work only. num_before: rows before those of the windows."""
        lens, own = windows.sampled.new_lens, windows.windows.rows
        rows = windows.captured_rows(0)
        if rows is None and own.offsets is not None:
            rows = own.padded_rows.flatten()
        elif rows is None:
            rows = torch.arange(own.num_rows, device=lens.device)
        torch.add(rows, num_before, out=self._rows[: len(rows)])
        self._lens[: len(lens)].copy_(lens)

    def _send_windows(self, batch: ScheduledBatch) -> None:
        self._has_windows = True
        requests = batch.generation_requests
        wanted = [i for i, request in enumerate(requests) if _is_recorded(request)]
        if not wanted:
            return
        path, buffer = batch.shape.path, self._spec.buffer
        indices = to_device(wanted, buffer.device)
        rows = self._rows[: len(requests) * path].view(-1, path).index_select(0, indices)
        states = buffer.index_select(0, rows.flatten()).view(len(wanted), path, -1)
        sent = ToHost([states, self._lens.index_select(0, indices)])
        for place, index in enumerate(wanted):
            found = requests[index].text_states
            assert found is not None
            found.add_window(sent, place, path)


def _is_recorded(request: LlmRequest) -> bool:
    return request.text_states is not None and not request.text_states.is_dropped
