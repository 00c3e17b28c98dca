"""Drafts with a network on the target's KV pages: after acceptance it reads the accepted tokens and
writes the next window into the slots.

The network's layers are extra layers of the target's pages: they share block table and page
numbers, so pages, rewinds and prefix reuse need no bookkeeping of their own. Draft rows of rejected
tokens are overwritten by the next round. Drafting is a function of device tensors, so that a CUDA
graph can hold it."""

from collections.abc import Iterable
from typing import Any

import torch

from tllm_spec.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.graphs.slot_graphs import GraphKey, GraphTable
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.rounds.device_span import DeviceSpan
from tllm_spec.executor.rounds.transfer import to_device
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.executor.speculative.drafting.round_end import (
    ContextResult,
    RoundEnd,
    WindowResult,
)
from tllm_spec.executor.speculative.drafting.tree_drafting import TreeDrafting


class DraftWorker(RoundEnd):
    """Drafts chains or trees: in the graph of a whole round (one-model path), or in the tail of a
    round that is split (two-model path). What a round of draft length 0 leaves for the network to
    read goes to the `backlog`."""

    def __init__(
        self,
        layers: DraftLayers,
        slots: SlotState,
        groups: RowGroups,
        sampling: DraftSampling,
        backlog: DraftBacklog,
        *,
        splits_rounds: bool = False,
    ) -> None:
        self.splits_rounds, self.reads_whole_windows = splits_rounds, layers.reads_whole_windows
        self.net = net = layers.net
        self._layers = layers
        self._groups = groups
        self._backlog = backlog
        self._slots = slots
        self._sampling = sampling
        self._trees = TreeDrafting(layers, slots, sampling)
        self._no_rows = torch.empty(0, dtype=torch.int64, device=slots.device)
        # Kept, because making them is a launch.
        num_rows = len(slots.kv_lens) * slots.shapes.longest.path
        self._rows_before = torch.arange(-1, num_rows - 1, device=slots.device)
        self._probs: torch.Tensor | None = None
        if sampling.keeps_probs:
            size = (len(slots.kv_lens), slots.max_draft_len, sampling.width(net.vocab_size))
            self._probs = torch.zeros(size, dtype=torch.float32, device=slots.device)

    def prepare(self, batch: ScheduledBatch) -> None:
        self._backlog.prepare(batch)

    def after_contexts(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        first_tokens: torch.Tensor | None,
        windows: WindowResult | None,
        *,
        is_timed: bool,
    ) -> DeviceSpan | None:
        contexts = ContextResult.of(batch, chunks, first_tokens)
        drafting = batch.last_chunk_requests
        if windows is not None:
            drafting = drafting + batch.generation_requests
        is_wanted = windows is not None or batch.drafts_after_contexts
        group, shape = self._groups.get(drafting, 1), batch.new_shape if is_wanted else NO_DRAFTS
        span = DeviceSpan() if is_timed else None
        self.draft(contexts, windows, group, shape)
        if span is not None:
            span.end()
        return span

    def tail(self, group: RowGroup, windows: WindowResult, shape: DraftShape) -> None:
        self.draft(None, windows, self._groups.one_row_each(group), shape)

    def launched(self, batch: ScheduledBatch) -> None:
        self._backlog.note(batch)

    def capture_graphs(self, rounds: GraphTable[Any], keys: Iterable[GraphKey]) -> None:
        self._backlog.capture_graphs(rounds, keys)

    def draft_probs(self, group: RowGroup, given: torch.Tensor | None) -> torch.Tensor | None:
        if self._probs is None or group.rows.window == 1:
            return given
        probs = self._probs.index_select(0, group.slots)[:, : group.rows.window - 1]
        return self._sampling.spread(probs)

    def draft(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> None:
        """Reads what the target has read and drafts for the requests of `group`, one row each,
        ended contexts before windows. With NO_DRAFTS it only reads, and windows of one token go to
        the backlog instead."""
        if windows is not None and windows.shape == NO_DRAFTS and shape == NO_DRAFTS:
            first_row = sum(len(chunk.tokens) for chunk in contexts.chunks) if contexts else 0
            self._backlog.store(windows.windows, windows.sampled.new_tokens[:, 0], first_row)
            if contexts is None:
                return
            windows = None
        is_drafting = shape != NO_DRAFTS and len(group.slots) > 0
        state, bound = self._catch_up(contexts, windows, is_drafting)
        if not is_drafting:
            return
        if shape.is_tree:
            self._trees.draft(group, shape, state, bound)
        else:
            self._draft_chains(group, shape.depth, state, bound)

    def _draft_chains(
        self, group: RowGroup, num_drafts: int, state: torch.Tensor, bound: int
    ) -> None:
        positions = self._slots.positions(group.slots, num_drafts)
        drafts: list[torch.Tensor] = []
        for step in range(num_drafts):
            if step:
                # The draft before is at position kv_lens + step; see DraftNet.shift for its
                # position in the draft cache.
                first = positions[step - 1 + self.net.shift]
                window = Windows(group.slots, first, drafts[-1].unsqueeze(1), bound + step)
                state = self._layers.forward([], window, state, step=step)
            logits = self.net.compute_logits(state)
            tokens, probs = self._sampling.choose(group, step, logits, positions[1])
            drafts.append(tokens)
            if probs is not None:
                assert self._probs is not None
                self._probs[group.slots, step] = probs
        self._slots.write_drafts(group.slots, torch.stack(drafts, dim=1))

    def _catch_up(
        self, contexts: ContextResult | None, windows: WindowResult | None, is_drafting: bool
    ) -> tuple[torch.Tensor, int]:
        """Reads what the target has just read, one token further. Returns the state of the rows
        that the first draft comes from, `[N, H]`, no rows unless `is_drafting`; and a bound of the
        KV lengths in the steps after it."""
        chunks, patched, last_rows = self._chunks(contexts)
        read, state = None, None
        bound = max((chunk.end for chunk in chunks), default=0)
        num_rows = sum(len(chunk.tokens) for chunk in chunks)
        if windows is not None:
            read = windows.read(self.net.shift)
            bound = max(bound, read.max_kv_len)
            captured = windows.captured_rows(num_rows)
            state = None if captured is None else self.net.state_of(captured)
        wanted = self._no_rows
        if is_drafting:
            wanted = self._drafted_from(last_rows, windows, num_rows)
        return self._layers.forward(chunks, read, state, patched, wanted), bound

    def _drafted_from(
        self, last_rows: list[int], windows: WindowResult | None, num_rows: int
    ) -> torch.Tensor:
        """The rows that drafts begin at, `[N]`: the last rows of ended contexts, and for each
        window the row of its last new token; windows come after the `num_rows` rows of chunks."""
        ended = to_device(last_rows, self._slots.device) if last_rows else self._no_rows
        if windows is None:
            return ended
        (batch, width), part = windows.sampled.new_tokens.shape, windows.windows.rows
        if part.offsets is None:
            rows = self._rows_before[: batch * width : width] + windows.sampled.new_lens
        else:
            rows = part.offsets[:-1] + windows.sampled.new_lens - 1
        return torch.cat((ended, rows + num_rows)) if num_rows else rows

    def _chunks(
        self, contexts: ContextResult | None
    ) -> tuple[list[ContextChunk], tuple[list[int], torch.Tensor] | None, list[int]]:
        """The draft network's chunks, with 0 where a sampled token belongs; those rows, with their
        tokens; and the last rows of ended contexts, which are the same rows."""
        if contexts is None:
            return [], None, []
        chunks: list[ContextChunk] = []
        last_rows: list[int] = []
        end = 0
        for chunk, following in zip(contexts.chunks, contexts.following, strict=True):
            chunks.append(self.net.draft_chunk(chunk, following))
            end += len(chunks[-1].tokens)
            if following is None:
                last_rows.append(end - 1)
        if contexts.first_tokens is None:
            return chunks, None, []
        return chunks, (last_rows, contexts.first_tokens.clamp_min(0)), last_rows
