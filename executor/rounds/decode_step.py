"""One round of generation windows as device work: the target's forward, then the tail, which is
sampling, acceptance and drafting.

`run` takes the requests of a batch. `whole`, `forward` and `tail` take nothing but slot numbers on
the device, which is what a CUDA graph captures."""

from dataclasses import dataclass, replace

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import TreeRows, Windows
from tllm_spec.executor.resources.window_tree import WindowTree
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.speculative.drafting.round_end import RoundEnd, WindowResult
from tllm_spec.kernels.round_rows import RoundRows
from tllm_spec.kernels.row_copies import gather_rows
from tllm_spec.kernels.tree_mask import TreeMask


@dataclass(frozen=True)
class SlotWindows:
    """The windows of slots, with drafts of one shape. `tree`: None for chains."""

    rows: Windows
    shape: DraftShape
    tree: WindowTree | None


class DecodeStep:
    """A round of generation windows as device work. Never waits for the device. `round_end`: the
    drafter's part of the round."""

    def __init__(self, engine: ModelEngine, sampler: Sampler, round_end: RoundEnd) -> None:
        self.engine = engine
        self.sampler = sampler
        self.round_end = round_end
        self._slots = sampler.slots
        self._groups = sampler.groups

    def run(
        self, batch: ScheduledBatch, logprobs: LogprobRows, hidden: torch.Tensor | None = None
    ) -> SampledTokens:
        """The batch's windows, kernel by kernel. hidden `[T, H]`: of a forward that ran
        already, so that the tail is left; None: nothing ran."""
        group = self.group(batch)
        windows = self.windows(group.slots, batch.shape, batch.max_kv_len, group.rows)
        if hidden is None:
            hidden = self.engine.forward([], windows.rows)
        logits = self.engine.compute_logits(hidden)
        result = self.sample(group, windows, logits, logprobs)
        self.round_end.tail(group, result, batch.new_shape)
        return result.sampled

    def whole(
        self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool, max_kv_len: int
    ) -> SampledTokens:
        """The whole round of the slots `[B]`, whose KV lengths are `max_kv_len` at most."""
        self._slots.reset_dummy()
        group = self._groups.of_slots(slot_ids, shape.window, sampled=is_sampled)
        windows = self.windows(slot_ids, shape, max_kv_len)
        logits = self.engine.compute_logits(self.engine.forward([], windows.rows))
        return self._end(group, windows, logits)

    def forward(self, slot_ids: torch.Tensor, shape: DraftShape) -> torch.Tensor:
        """Hidden states of the slots' windows, `[B * W, H]`: the same for every way of sampling."""
        self._slots.reset_dummy()
        return self.engine.forward([], self.windows(slot_ids, shape, self.max_len).rows)

    def tail(
        self, slot_ids: torch.Tensor, hidden: torch.Tensor, shape: DraftShape, is_sampled: bool
    ) -> SampledTokens:
        """What follows in a round whose forward of the slots `[B]` has left `hidden` `[B * W, H]`,
        under the masks that were sent."""
        group = self._groups.of_slots(slot_ids, shape.window, sampled=is_sampled)
        windows = self.windows(slot_ids, shape, self.max_len)
        logits = self.engine.compute_logits(hidden)
        self.sampler.grammar_masks.apply_sent(logits)
        return self._end(group, windows, logits)

    @property
    def max_len(self) -> int:
        """The KV length of the longest request that there can be."""
        return self.engine.rows.max_len

    def group(self, batch: ScheduledBatch) -> RowGroup:
        return self._groups.get(batch.generation_requests, batch.shape.window, batch.row_counts)

    def windows(
        self,
        slot_ids: torch.Tensor,
        shape: DraftShape,
        max_kv_len: int,
        part: RoundRows | None = None,
    ) -> SlotWindows:
        """part: see `Windows`."""
        tree, width = self._slots.tree(slot_ids, shape), shape.window
        rows = Windows(
            slots=slot_ids,
            first=gather_rows(self._slots.kv_lens, slot_ids),
            token_ids=gather_rows(self._slots.window[:, :width], slot_ids),
            max_kv_len=max_kv_len,
            tree=None if tree is None else TreeRows(tree.depths, TreeMask(tree.bits, width), 0),
            part=part,
        )
        return SlotWindows(rows, shape, tree)

    def _end(self, group: RowGroup, windows: SlotWindows, logits: torch.Tensor) -> SampledTokens:
        result = self.sample(group, windows, logits, LogprobRows())
        self.round_end.tail(group, result, windows.shape)
        return result.sampled

    def sample(
        self, group: RowGroup, windows: SlotWindows, logits: torch.Tensor, logprobs: LogprobRows
    ) -> WindowResult:
        """Accepts drafts and advances the slots. logits `[T, V]`: of the windows' rows."""
        self._slots.limit_drafts(group.slots, group.rows)
        probs, rows = self.round_end.draft_probs(group), windows.rows
        num_drafts = self._slots.num_verified(rows.slots, windows.shape)
        sampled = self.sampler.sample_windows(
            group, logits, rows.first, probs, logprobs, windows.tree
        )
        if sampled.rows is not None:
            self.engine.keep_paths(rows, sampled.rows, sampled.new_lens)
        if num_drafts is not None:
            sampled = replace(sampled, num_drafts=num_drafts)
        return WindowResult(rows, sampled, windows.shape)
