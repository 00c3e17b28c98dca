"""Drafts inside the target's rounds: a proposer makes them, and they are written to the next
windows."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.graphs.slot_graphs import GraphKey, SlotGraphs
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.proposer import Proposer
from tllm_spec.executor.speculative.drafting.round_end import ContextResult, RoundEnd, WindowResult


class DraftWorker(RoundEnd):
    """Writes a proposer's drafts to the slots: in the graph of a whole round (one-model path), or
    in the tail of a round that is split (two-model path)."""

    def __init__(
        self,
        proposer: Proposer,
        slots: SlotState,
        groups: RowGroups,
        *,
        splits_rounds: bool = False,
    ) -> None:
        self.proposer = proposer
        self.splits_rounds, self.reads_whole_windows = splits_rounds, proposer.reads_whole_windows
        self._slots, self._groups = slots, groups

    def prepare(self, batch: ScheduledBatch) -> None:
        self.proposer.prepare(batch)

    def after_contexts(
        self, batch: ScheduledBatch, contexts: ContextResult, windows: WindowResult | None
    ) -> None:
        drafting = batch.last_chunk_requests
        if windows is not None:
            drafting = drafting + batch.generation_requests
        is_wanted = windows is not None or batch.drafts_after_contexts
        group, shape = self._groups.get(drafting, 1), batch.new_shape if is_wanted else NO_DRAFTS
        self._draft(contexts, windows, group, shape)

    def tail(self, group: RowGroup, windows: WindowResult, shape: DraftShape) -> None:
        self._draft(None, windows, self._groups.one_row_each(group), shape)

    def launched(self, batch: ScheduledBatch) -> None:
        self.proposer.launched(batch)

    def capture_graphs(self, rounds: SlotGraphs[Any], keys: Iterable[GraphKey]) -> None:
        self.proposer.capture_graphs(rounds, keys)

    def draft_probs(self, group: RowGroup) -> torch.Tensor | None:
        return self.proposer.draft_probs(group)

    def state(self) -> Mapping[str, Any]:
        return self.proposer.state()

    def _draft(
        self,
        contexts: ContextResult | None,
        windows: WindowResult | None,
        group: RowGroup,
        shape: DraftShape,
    ) -> None:
        drafts = self.proposer.propose(contexts, windows, group, shape)
        if drafts is not None:
            self._slots.write(group.slots, drafts)
