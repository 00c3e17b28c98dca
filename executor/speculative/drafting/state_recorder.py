"""Sends the target's hidden states of some requests to the host, round after round
(`record_hidden_states`)."""

import torch

from tllm_spec.attention.interface import SpecMetadata
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import ToHost, to_device
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.speculative.drafting.drafter import ContextResult, RoundResult, WindowResult


class StateRecorder:
    """Copies of what the target's forward has captured in `spec`, for requests with `text_states`.
    Of windows `see`, which may be in a graph, only notes which rows were accepted; `launched` sends
    them."""

    def __init__(self, spec: SpecMetadata, slots: SlotState) -> None:
        self._spec = spec
        num_slots, path = len(slots.kv_lens), slots.shapes.longest.path
        # The accepted rows of each request in the latest tail, [B, D+1], and how many there are.
        self._rows = torch.zeros(num_slots * path, dtype=torch.int64, device=slots.device)
        self._lens = torch.zeros(num_slots, dtype=torch.int64, device=slots.device)

    def see(self, seen: RoundResult) -> None:
        """Called after the sampling of a forward, with what it read. Without contexts it is device
        work only."""
        if seen.contexts is not None:
            self._send_chunks(seen.contexts)
        if seen.windows is not None:
            self._note(seen.windows, seen.num_chunk_rows)

    def launched(self, batch: ScheduledBatch) -> None:
        """Called after everything of the round was launched. Sends what windows have emitted."""
        path, buffer, requests = batch.shape.path, self._spec.buffer, batch.generation_requests
        wanted = [i for i, request in enumerate(requests) if _is_recorded(request)]
        if not wanted:
            return
        indices = to_device(wanted, buffer.device)
        rows = self._rows[: len(requests) * path].view(-1, path).index_select(0, indices)
        states = buffer.index_select(0, rows.flatten()).view(len(wanted), path, -1)
        sent = ToHost([states, self._lens.index_select(0, indices)])
        for place, index in enumerate(wanted):
            found = requests[index].text_states
            assert found is not None
            found.add(sent, place, path, is_window=True)

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
            request.text_states.add(sent, first, number, is_window=False)
            first += number

    def _note(self, windows: WindowResult, num_before: int) -> None:
        """num_before: rows before those of the windows."""
        lens, own = windows.sampled.new_lens, windows.windows.rows
        rows = windows.captured_rows(0)
        if rows is None and own.offsets is not None:
            rows = own.padded_rows.flatten()
        elif rows is None:
            rows = torch.arange(own.num_rows, device=lens.device)
        torch.add(rows, num_before, out=self._rows[: len(rows)])
        self._lens[: len(lens)].copy_(lens)


def _is_recorded(request: LlmRequest) -> bool:
    return request.text_states is not None and not request.text_states.is_dropped
