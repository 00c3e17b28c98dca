"""The target of a replay for a draft head: its hidden states are known, so no layer of it runs.

They were recorded, or whole texts are read before, in large chunks (`is_reading`)."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.sampling.row_group import RowGroup, RowPositions
from tllm_spec.executor.sampling.sampler import Sampler


class ReplayedEngine(ModelEngine, ResourceManager):
    """`states`: by request id, `[T, n * H]` on the host, what the target captures for the head at
    the first T positions of the request's text. A request with an id that is missing can only be
    read. max_len: tokens of the longest text."""

    def __init__(self, engine: ModelEngine, num_slots: int, max_len: int) -> None:
        super().__init__(engine.model, engine.attention, engine.spec, engine.adapters)
        assert self.spec is not None
        self.states: dict[int, torch.Tensor] = {}
        self.is_reading = False
        self._buffer = self.spec.buffer
        self._readers: dict[int, torch.Tensor] = {}  # by slot
        size = num_slots, max_len + 1, self._buffer.shape[1]
        self._table = self._buffer.new_zeros(size)  # after a text zeros; the last column, too

    def prepare_resources(self, batch: ScheduledBatch) -> None:
        for request in batch.joining:
            if self.is_reading:
                size = request.num_tokens, self._buffer.shape[1]
                states = torch.empty(size, dtype=self._buffer.dtype)
                self.states[request.request_id] = self._readers[request.slot] = states
                continue
            states, row = self.states[request.request_id], self._table[request.slot]
            row[: len(states)] = states.to(row.device)
            row[len(states) :] = 0

    def forward(
        self,
        contexts: list[ContextChunk],
        windows: Windows | None,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As in `ModelEngine`, but while nothing is read hidden states are zeros."""
        if self.is_reading:
            hidden, first = super().forward(contexts, windows, wanted), 0
            for chunk in contexts:
                own = self._buffer[first : first + len(chunk.tokens)]
                self._readers[chunk.slot][chunk.start : chunk.end] = own.cpu()
                first += len(chunk.tokens)
            return hidden
        positions = self.attention.plan(contexts, windows, only_writes=True).positions
        slots = [torch.full((len(each.tokens),), each.slot) for each in contexts]
        parts = [torch.cat(slots).to(positions.device)] if slots else []
        if windows is not None:
            parts.append(windows.rows.expand(windows.slots))
        last = self._table.shape[1] - 1
        states = self._table[torch.cat(parts), positions.clamp_max(last)]
        self._buffer[: len(states)].copy_(states)
        num_rows = len(states) if wanted is None else len(wanted)
        return states.new_zeros((num_rows, self.model.config.hidden_size))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """No token is chosen by them: see `ReplayedSampler`."""
        return hidden.new_zeros((len(hidden), self.model.config.vocab_size))


# A target whose choices are known: replays recorded texts, so that drafts are verified against
# them whatever the logits are.


class ReplayedSampler(Sampler):
    """The choice at a position is the token that the text has there. texts: prompt and output by
    request id, of at most `max_len` tokens. After its end a text has zeros: a request ends there,
    so what its last window holds beyond does not count."""

    def __init__(
        self, texts: Mapping[int, Sequence[int]], max_len: int, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, **options)
        shape = len(self.slots.window), max_len
        self._by_id = texts
        self._texts = torch.zeros(shape, dtype=torch.int64, device=self.slots.device)

    def start(self, request: LlmRequest) -> None:
        super().start(request)
        text = self._by_id[request.request_id]
        row = self._texts[request.slot]
        row[: len(text)] = to_device(array("q", text), row.device)
        row[len(text) :] = 0

    def _choose(self, group: RowGroup, logits: torch.Tensor, at: RowPositions) -> torch.Tensor:
        slots, positions = group.rows.expand(group.slots), at.positions(group.rows)
        return self._texts[slots, positions.clamp_max(self._texts.shape[1] - 1)]
