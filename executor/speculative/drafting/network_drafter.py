"""Drafts with a network on the target's KV pages: after acceptance it reads the accepted tokens and
drafts the next window.

The network's layers are extra layers of the target's pages: they share block table and page
numbers, so pages, rewinds and prefix reuse need no bookkeeping of their own. Draft rows of rejected
tokens are overwritten by the next round."""

from collections.abc import Iterable
from typing import Any

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.transfer import to_device
from tllm_spec.executor.engine.rows import ContextChunk
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.draft_net import DraftLayers
from tllm_spec.executor.speculative.drafting.drafter import (
    ContextResult,
    Drafter,
    When,
    WindowResult,
)
from tllm_spec.executor.speculative.drafting.drafting_steps import (
    ChainDrafting,
    TreeDrafting,
    fill_in,
    read_masks,
    with_masks,
)
from tllm_spec.kernels.slots.accept import Drafts
from tllm_spec.kernels.slots.row_copies import gather_rows


class NetworkDrafter(Drafter):
    """Drafts chains or trees with a network, in the graph of a round (one-model path) or in its
    tail (two-model path). What a round of draft length 0 leaves for the network to read goes to the
    `backlog`. scores_trees: trees come with `DraftTree.scores`."""

    def __init__(
        self,
        layers: DraftLayers,
        slots: SlotState,
        sampling: DraftSampling,
        backlog: DraftBacklog,
        when: When,
        *,
        scores_trees: bool = False,
    ) -> None:
        self.net, self.reads_whole_windows = layers.net, layers.reads_whole_windows
        self.when = when
        self._layers = layers
        self._backlog = backlog
        self._slots = slots
        self._chains = ChainDrafting(layers, slots, sampling)
        self._trees = TreeDrafting(layers, sampling, slots.device, with_scores=scores_trees)
        self._no_rows = torch.empty(0, dtype=torch.int64, device=slots.device)
        # Kept, because making them is a launch.
        num_rows = len(slots.kv_lens) * slots.shapes.longest.path
        self._rows_before = torch.arange(-1, num_rows - 1, device=slots.device)

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        """Drafts are in the slots. The network reads what it has missed, if it must."""
        self._backlog.prepare(scheduled_requests)

    def launched(self, batch: ScheduledBatch) -> None:
        self._backlog.note(batch)

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        self._backlog.capture_graphs(rounds, keys)

    def draft_probs(self, group: RowGroup) -> torch.Tensor | None:
        return self._chains.probs(group)

    def propose(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> Drafts | None:
        """Reads what the target has read, and drafts. With NO_DRAFTS it only reads, and windows of
        one token go to the backlog instead."""
        if windows is not None and windows.shape == NO_DRAFTS and shape == NO_DRAFTS:
            first_row = sum(len(chunk.tokens) for chunk in contexts.chunks) if contexts else 0
            self._backlog.store(windows.windows, windows.sampled.new_tokens[:, 0], first_row)
            if contexts is None:
                return None
            windows = None
        is_drafting = shape != NO_DRAFTS and len(group.slots) > 0
        if self.net.masks is not None and is_drafting:
            return self._propose_block(contexts, windows, group, shape)
        state, bound = self._catch_up(contexts, windows, is_drafting)
        if not is_drafting:
            return None
        drafting = self._trees if shape.is_tree else self._chains
        kv_lens = gather_rows(self._slots.kv_lens, group.slots)
        return drafting.draft(group, shape, kv_lens, state, bound)

    def _propose_block(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> Drafts:
        """All drafts come from one forward, which reads what was emitted, too. With contexts or
        parts of windows, and where mask rows fill in, they have a forward of their own."""
        kv_lens = gather_rows(self._slots.kv_lens, group.slots)
        if self.net.fills_in:
            _, bound = self._catch_up(contexts, windows, False)
            newest = gather_rows(self._slots.window[:, 0], group.slots)
            parts = self._layers, group.slots, kv_lens, newest
            states = fill_in(*parts, shape.depth, bound)
        elif contexts is None and windows is not None and windows.windows.rows.offsets is None:
            states = self._read_with_masks(windows, shape.depth)
        else:
            states, bound = self._catch_up(contexts, windows, True)
            if num_masks := shape.depth - 1:
                later = read_masks(self._layers, group.slots, kv_lens, num_masks, bound)
                states = torch.cat((states, later))
        if shape.is_tree:
            return self._trees.draft_block(group, shape, kv_lens, states)
        return self._chains.draft_block(group, shape, kv_lens, states)

    def _read_with_masks(self, windows: WindowResult, num_drafts: int) -> torch.Tensor:
        """Reads what windows have emitted, with mask rows after it. Returns the states that drafts
        come from, `[num_drafts * N, H]`."""
        net, read, state = self.net, windows.read(self.net.lookahead), None
        assert net.masks is not None
        if net.masks.state is not None:
            rows = windows.captured_rows(0)
            if rows is None:
                captured = net.captured(read.token_ids.numel())
                assert captured is not None
                state = net.fuse(captured)
            else:
                state = net.state_of(rows)
        new_lens = windows.sampled.new_lens
        read, state, wanted = with_masks(read, state, new_lens, num_drafts, net.masks)
        return self._layers.forward([], read, state, wanted=wanted)

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
            read = windows.read(self.net.lookahead)
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
        (batch, width), part = windows.sampled.new_tokens.shape, windows.read_part
        if part is None or part.offsets is None:
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
