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
from tllm_spec.executor.resources.slot_state import WindowTree
from tllm_spec.executor.sampling.logprobs import LogprobRows
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.speculative.drafting.round_end import RoundEnd, WindowResult
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.slots.row_copies import gather_rows


@dataclass(frozen=True)
class SlotWindows:
    """The windows of slots, with drafts of one shape. `tree`: None for chains. `read_rows`: see
    `WindowResult`."""

    rows: Windows
    shape: DraftShape
    tree: WindowTree | None
    read_rows: torch.Tensor | None = None


class DecodeStep:
    """A round of generation windows as device work. Never waits for the device. `round_end`: the
    drafter's part of the round."""

    def __init__(self, engine: ModelEngine, sampler: Sampler, round_end: RoundEnd) -> None:
        self.engine = engine
        self.sampler = sampler
        self.round_end = round_end
        self._slots = sampler.slots
        self._groups = sampler.groups
        # Where a forward of its own leaves the offsets of its windows' rows for the tail.
        num_offsets = 1 + len(self._slots.kv_lens)
        self._offsets = torch.zeros(num_offsets, dtype=torch.int32, device=self._slots.device)

    def run(
        self, batch: ScheduledBatch, logprobs: LogprobRows, hidden: torch.Tensor | None = None
    ) -> SampledTokens:
        """The batch's windows, kernel by kernel. hidden `[T, H]`: of a forward that ran
        already, so that the tail is left; None: nothing ran."""
        group, shape = self.group(batch), batch.shape
        if hidden is None:
            windows = self.batch_windows(batch, group)
            hidden = self.engine.forward([], windows.rows)
        else:
            part = self._chosen_part(len(group.slots), shape, len(hidden))
            windows = self.windows(group.slots, shape, batch.max_kv_len, part)
        windows, hidden = whole_windows(windows, hidden)
        logits = self.engine.compute_logits(hidden)
        result = self.sample(group, windows, logits, logprobs)
        self.round_end.tail(group, result, batch.new_shape)
        return result.sampled

    def whole(
        self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool, max_kv_len: int
    ) -> SampledTokens:
        """The whole round of the slots `[B]`, whose KV lengths are `max_kv_len` at most."""
        self._slots.reset_dummy()
        part = self._choose_part(slot_ids, shape, shape.num_rows(len(slot_ids)))
        windows = self.windows(slot_ids, shape, max_kv_len, part)
        return self._end(windows, self.engine.forward([], windows.rows), is_sampled)

    def forward(self, slot_ids: torch.Tensor, shape: DraftShape) -> torch.Tensor:
        """Hidden states of the slots' windows, `[T, H]`: the same for every way of sampling."""
        self._slots.reset_dummy()
        part = self._choose_part(slot_ids, shape, shape.num_rows(len(slot_ids)))
        self._keep_offsets(part)
        return self.engine.forward([], self.windows(slot_ids, shape, self.max_len, part).rows)

    def tail(
        self, slot_ids: torch.Tensor, hidden: torch.Tensor, shape: DraftShape, is_sampled: bool
    ) -> SampledTokens:
        """What follows in a round whose forward of the slots `[B]` has left `hidden` `[T, H]`,
        under the masks that were sent."""
        part = self._chosen_part(len(slot_ids), shape, len(hidden))
        windows = self.windows(slot_ids, shape, self.max_len, part)
        return self._end(windows, hidden, is_sampled, is_masked=True)

    def before_tail(self, batch_size: int, shape: DraftShape) -> None:
        """Prepares the slots for a tail of dummy requests that no forward came before."""
        self._slots.reset_dummy()
        if shape.is_ragged:
            slot_ids = torch.full(
                (batch_size,), len(self._slots.kv_lens) - 1, device=self._slots.device
            )
            self._keep_offsets(self._choose_part(slot_ids, shape, shape.num_rows(batch_size)))

    @property
    def max_len(self) -> int:
        """The KV length of the longest request that there can be."""
        return self.engine.rows.max_len

    def group(self, batch: ScheduledBatch) -> RowGroup:
        return self._groups.get(batch.generation_requests, batch.shape.window, batch.row_counts)

    def batch_windows(self, batch: ScheduledBatch, group: RowGroup) -> SlotWindows:
        """The windows of the batch's group."""
        part = self._choose_part(group.slots, batch.shape, batch.num_window_rows) or group.rows
        return self.windows(group.slots, batch.shape, batch.max_kv_len, part)

    def _choose_part(
        self, slot_ids: torch.Tensor, shape: DraftShape, num_rows: int
    ) -> RoundRows | None:
        """The rows of a round of slots `[B]` whose requests share `num_rows` rows; None: whole
        windows."""
        if not shape.is_ragged:
            return None
        return self._slots.choose_rows(slot_ids, shape, num_rows)

    def _keep_offsets(self, part: RoundRows | None) -> None:
        if part is not None and part.offsets is not None:
            self._offsets[: len(part.offsets)].copy_(part.offsets)

    def _chosen_part(self, number: int, shape: DraftShape, num_rows: int) -> RoundRows | None:
        """The rows of the first `number` requests of the forward that ran, which had `num_rows` in
        all."""
        if not shape.is_ragged:
            return None
        return RoundRows(number, shape.window, num_rows, self._offsets[: number + 1])

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

    def _end(
        self,
        windows: SlotWindows,
        hidden: torch.Tensor,
        is_sampled: bool,
        *,
        is_masked: bool = False,
    ) -> SampledTokens:
        """is_masked: by the masks that were sent."""
        if self.round_end.reads_whole_windows:
            windows, hidden = whole_windows(windows, hidden)
        slot_ids, part = windows.rows.slots, windows.rows.part
        group = self._groups.of_slots(slot_ids, windows.shape.window, sampled=is_sampled, rows=part)
        logits = self.engine.compute_logits(hidden)
        if is_masked:
            self.sampler.grammar_masks.apply_sent(logits, group)
        result = self.sample(group, windows, logits, LogprobRows())
        self.round_end.tail(group, result, windows.shape)
        return result.sampled

    def sample(
        self, group: RowGroup, windows: SlotWindows, logits: torch.Tensor, logprobs: LogprobRows
    ) -> WindowResult:
        """Accepts drafts and advances the slots. logits `[T, V]`: of the windows' rows."""
        self._slots.limit_drafts(group.slots, group.rows)
        probs, rows = self.round_end.draft_probs(group), windows.rows
        num_verified = self._slots.num_verified(rows.slots, windows.shape)
        sampled = self.sampler.sample_windows(
            group, logits, rows.first, probs, logprobs, windows.tree
        )
        if sampled.rows is not None:
            self.engine.keep_paths(rows, sampled.rows, sampled.new_lens)
        if num_verified is not None:
            self._slots.learn(rows.slots, num_verified, sampled.new_lens)
            columns = self._slots.reported(rows.slots, num_verified, windows.shape)
            sampled = replace(sampled, num_drafts=columns)
        return WindowResult(rows, sampled, windows.shape, windows.read_rows)


def whole_windows(windows: SlotWindows, hidden: torch.Tensor) -> tuple[SlotWindows, torch.Tensor]:
    """Pads windows and the hidden states `[T, H]` of their rows to whole windows, for groups with
    rules that only the host knows. Rows that the device gave to other requests are filled with
    copies of the request's last row; no draft there is accepted."""
    part = windows.rows.part
    if not windows.shape.is_ragged or part is None or part.offsets is None:
        return windows, hidden
    rows = replace(windows.rows, part=None)
    read_rows = part.padded_rows.flatten()
    return replace(windows, rows=rows, read_rows=read_rows), hidden.index_select(0, read_rows)
