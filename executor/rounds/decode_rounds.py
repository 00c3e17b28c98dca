"""Rounds of generation windows, which have two forms: one CUDA graph for the whole round, or the
forward and then the tail, each a graph or eager.

A round is split where its drafts are made in launches of their own, where the host sends masks of
grammars between the two, where a request's rules need more than a graph knows (then the tail is
eager), and where no graph fits (then both are)."""

from dataclasses import replace
from operator import attrgetter

import torch

from tllm_spec.config.draft_shape import NO_DRAFTS, DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import TreeRows, Windows
from tllm_spec.executor.graphs.slot_graphs import CudaGraphs, GraphKey, GraphPool, WindowGraphs
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import WindowTree
from tllm_spec.executor.sampling.logits import LogprobRows
from tllm_spec.executor.sampling.row_group import RowGroup, RowPositions
from tllm_spec.executor.sampling.sampler import Sampler
from tllm_spec.executor.speculative.drafting.drafter import Drafter, RoundResult, When, WindowResult
from tllm_spec.executor.speculative.drafting.state_recorder import StateRecorder
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.slots.round_rows import RoundRows
from tllm_spec.kernels.slots.row_copies import gather_rows

_graph_samples, _slot = attrgetter("graph_samples"), attrgetter("slot")


class DecodeRounds:
    """Runs batches of generation windows. Never waits for the device. graphs: None before
    `capture`. recorder: sees what is read and emitted; None: nothing is recorded.

    `_whole`, `_forward` and `_tail` take nothing but slot numbers on the device, which is what a
    CUDA graph captures."""

    def __init__(
        self,
        engine: ModelEngine,
        sampler: Sampler,
        drafter: Drafter,
        recorder: StateRecorder | None = None,
    ) -> None:
        self.engine = engine
        self.sampler = sampler
        self.drafter = drafter
        self.drafts_ahead = drafter.drafts_ahead
        self.graphs: WindowGraphs | None = None
        self._recorder = recorder
        self._slots, self._groups = sampler.slots, sampler.groups
        self._masks = sampler.grammar_masks
        self._hidden = torch.empty(0)  # [T, H], where every forward graph leaves its result
        # Where a forward of its own leaves the offsets of its windows' rows for the tail.
        num_offsets = 1 + len(self._slots.kv_lens)
        self._offsets = torch.zeros(num_offsets, dtype=torch.int32, device=self._slots.device)

    def run(self, batch: ScheduledBatch, logprobs: LogprobRows) -> SampledTokens:
        """The batch's windows: one graph, two, or what no graph holds kernel by kernel."""
        graphs, shape, hidden = self.graphs, batch.shape, None
        if graphs is not None and batch.row_counts is None:
            replayed = self._replay(graphs, batch)
            if isinstance(replayed, SampledTokens):
                return replayed
            hidden = replayed
        if hidden is None:
            group, windows = self.batch_windows(batch)
            hidden = self.engine.forward([], windows)
        else:
            group = self._groups.get(batch.generation_requests, shape.window)
            part = self._chosen_part(len(group.slots), shape, len(hidden))
            windows = self._windows(group.slots, shape, batch.max_kv_len, part)
        read_rows = None
        if shape.is_ragged:
            windows, hidden, read_rows = whole_windows(windows, hidden)
        logits = self.engine.compute_logits(hidden)
        result = self.sample(group, windows, shape, logits, logprobs, read_rows)
        self.draft(RoundResult(None, result), group, batch.new_shape)
        return result.sampled

    def _replay(
        self, graphs: WindowGraphs, batch: ScheduledBatch
    ) -> SampledTokens | torch.Tensor | None:
        """The round's results; hidden states `[T, H]` where only the forward has a graph; None
        where no graph fits."""
        requests, shape = batch.generation_requests, batch.shape
        slots, is_sampled = list(map(_slot, requests)), _way_of_sampling(requests)
        if is_sampled is not None and not self._masks.has_windows:
            sampled = graphs.whole.replay(slots, shape, is_sampled, self.engine.is_adapted)
            if sampled is not None:
                return sampled
        forward = graphs.forwards.run(slots, shape, False, self.engine.is_adapted)
        if forward is None:
            return None
        num_padded = graphs.tails.padded(len(slots))
        if is_sampled is not None and num_padded:
            self._masks.send(requests, shape.window, num_padded * shape.window)
            is_adapted = self._adapts_drafts and self.engine.is_adapted
            sampled = graphs.tails.replay(slots, shape, is_sampled, is_adapted)
            assert sampled is not None, "each forward has its tails"
            return sampled
        return forward.result[: None if shape.is_ragged else batch.num_window_rows]

    def draft(self, seen: RoundResult, group: RowGroup, shape: DraftShape) -> None:
        """Shows the drafter what was read and emitted, and writes its drafts of this shape to the
        group's slots. group: with contexts as in `Drafter.propose`, otherwise that of the
        windows."""
        drafter = self.drafter
        if drafter.when is not When.HOST:
            if seen.contexts is None and self.drafts_ahead:
                group = self._groups.one_row_each(group)
            drafts = drafter.propose(seen, group, shape)
            if drafts is not None:
                self._slots.write(group.slots, drafts)
        if self._recorder is not None:
            self._recorder.see(seen)

    def draft_after_contexts(self, batch: ScheduledBatch, seen: RoundResult) -> None:
        """Called after the sampling of a forward with context chunks."""
        drafting, windows = batch.last_chunk_requests, seen.windows
        if windows is not None and self.drafts_ahead:
            drafting = drafting + batch.generation_requests
        is_wanted = windows is not None or batch.drafts_after_contexts
        shape = batch.new_shape if is_wanted else NO_DRAFTS
        self.draft(seen, self._groups.get(drafting, 1), shape)

    def capture(self, keys: list[GraphKey], *, pads: bool, pool: GraphPool | None) -> WindowGraphs:
        """Raises ValueError when the memory does not suffice."""
        splits_rounds, device = self.drafter.when is When.TAIL, self._slots.device
        whole = CudaGraphs(self.whole, self._slots.dummy_slot, device, pads=pads, pool=pool)
        adapted = [replace(key, adapted=True) for key in keys if self.engine.adapters is not None]
        whole.capture([] if splits_rounds else keys + adapted, self._prepare_forward)
        model, num_rows = self.engine.model, max((key.num_tokens for key in keys), default=0)
        size = num_rows, model.config.hidden_size
        self._hidden = torch.empty(size, dtype=model.dtype, device=device)
        forwards = whole.for_same_slots(self._forward)
        wanted = {replace(key, sampled=False) for key in keys + adapted}
        forwards.capture(wanted, self._prepare_forward)
        if self._masks.is_served:
            self._masks.make_room(max(key.batch_size * key.shape.window for key in keys))
        tails = whole.for_same_results(self._tail)
        # A forward begins with the dummy slot empty, but no tail does.
        of_tails = keys + adapted if self._adapts_drafts else keys
        has_tails = splits_rounds or self._masks.is_served
        tails.capture(of_tails if has_tails else [], self._prepare_dummy_tail)
        self._slots.reset_dummy()
        self.engine.use_adapters(False)
        self.graphs = WindowGraphs(whole, forwards, tails)
        return self.graphs

    def whole(
        self,
        slot_ids: torch.Tensor,
        shape: DraftShape,
        is_sampled: bool,
        max_kv_len: int | None = None,
    ) -> SampledTokens:
        """The whole round of the slots `[B]`. max_kv_len: of their contexts; None: any length."""
        self._slots.reset_dummy()
        part = self._choose_part(slot_ids, shape, shape.num_rows(len(slot_ids)))
        windows = self._windows(slot_ids, shape, max_kv_len or self.max_len, part)
        return self._end(windows, shape, self.engine.forward([], windows), is_sampled)

    def _forward(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> torch.Tensor:
        """Hidden states of the slots' windows, `[T, H]`: the same for every way of sampling."""
        self._slots.reset_dummy()
        part = self._choose_part(slot_ids, shape, shape.num_rows(len(slot_ids)))
        self._keep_offsets(part)
        windows = self._windows(slot_ids, shape, self.max_len, part)
        hidden = self.engine.forward([], windows)
        return self._hidden[: len(hidden)].copy_(hidden)

    def _tail(self, slot_ids: torch.Tensor, shape: DraftShape, is_sampled: bool) -> SampledTokens:
        """What follows in a round whose forward of the slots `[B]` was `_forward`, under the masks
        that were sent."""
        hidden = self._hidden[: shape.num_rows(len(slot_ids))]
        part = self._chosen_part(len(slot_ids), shape, len(hidden))
        windows = self._windows(slot_ids, shape, self.max_len, part)
        return self._end(windows, shape, hidden, is_sampled, is_masked=True)

    def _prepare_forward(self, key: GraphKey) -> None:
        self.engine.use_adapters(key.adapted)

    def _prepare_dummy_tail(self, key: GraphKey) -> None:
        """Prepares the slots for a tail of dummy requests that no forward came before."""
        self.engine.use_adapters(key.adapted)
        self._slots.reset_dummy()
        shape = key.shape
        if shape.is_ragged:
            slot_ids = torch.full(
                (key.batch_size,), len(self._slots.kv_lens) - 1, device=self._slots.device
            )
            self._keep_offsets(self._choose_part(slot_ids, shape, shape.num_rows(key.batch_size)))

    def _end(
        self,
        windows: Windows,
        shape: DraftShape,
        hidden: torch.Tensor,
        is_sampled: bool,
        *,
        is_masked: bool = False,
    ) -> SampledTokens:
        """is_masked: by the masks that were sent."""
        read_rows = None
        if self.drafter.reads_whole_windows and shape.is_ragged:
            windows, hidden, read_rows = whole_windows(windows, hidden)
        group = self._groups.of_slots(
            windows.slots, shape.window, sampled=is_sampled, rows=windows.part
        )
        logits = self.engine.compute_logits(hidden)
        if is_masked:
            self._masks.apply_sent(logits, group)
        result = self.sample(group, windows, shape, logits, LogprobRows(), read_rows)
        self.draft(RoundResult(None, result), group, shape)
        return result.sampled

    @property
    def _adapts_drafts(self) -> bool:
        adapters = self.engine.adapters
        return adapters is not None and adapters.draft_tables is not None

    @property
    def max_len(self) -> int:
        """The KV length of the longest request that there can be."""
        return self.engine.rows.max_len

    def batch_windows(self, batch: ScheduledBatch) -> tuple[RowGroup, Windows]:
        """The batch's generating requests as a group, and their windows."""
        shape = batch.shape
        group = self._groups.get(batch.generation_requests, shape.window, batch.row_counts)
        part: RoundRows | None = group.rows
        if shape.is_ragged:
            part = self._choose_part(group.slots, shape, batch.num_window_rows)
        return group, self._windows(group.slots, shape, batch.max_kv_len, part)

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

    def _windows(
        self,
        slot_ids: torch.Tensor,
        shape: DraftShape,
        max_kv_len: int,
        part: RoundRows | None = None,
    ) -> Windows:
        """part: see `Windows`."""
        width, tree = shape.window, None
        if width > 1 and self._slots.shapes.has_trees:
            own = self._slots.tree(slot_ids, shape)
            tree = TreeRows(own.depths, TreeMask(own.bits, width))
        return Windows(
            slots=slot_ids,
            first=gather_rows(self._slots.kv_lens, slot_ids),
            token_ids=gather_rows(self._slots.window[:, :width], slot_ids),
            max_kv_len=max_kv_len,
            tree=tree,
            part=part,
        )

    def sample(
        self,
        group: RowGroup,
        windows: Windows,
        shape: DraftShape,
        logits: torch.Tensor,
        logprobs: LogprobRows,
        read_rows: torch.Tensor | None = None,
    ) -> WindowResult:
        """Accepts drafts of this shape and advances the slots. logits `[T, V]`: of the windows'
        rows. read_rows: see `WindowResult`."""
        slots, slot_ids, probs, num_verified = self._slots, windows.slots, None, None
        if group.rows.offsets is not None:
            slots.limit_drafts(group.slots, group.rows.offsets)
        if self.sampler.rejection:
            probs = self.drafter.draft_probs(group)
        if slots.counts_drafts or shape.is_copied:
            num_verified = slots.num_verified(slot_ids, shape)
        tree = None
        if windows.tree is not None:
            tree = WindowTree(shape.depth, windows.tree.depths, windows.tree.mask.bits)
        at = RowPositions(windows.first, 1, tree)
        sampled = self.sampler.sample(group, logits, at, probs, logprobs)
        if sampled.rows is not None:
            self.engine.attention.keep_paths(windows, sampled.rows, sampled.new_lens)
        if num_verified is not None:
            slots.learn(slot_ids, num_verified, sampled.new_lens)
            columns = slots.reported(slot_ids, num_verified, shape)
            sampled = replace(sampled, num_drafts=columns)
        return WindowResult(windows, sampled, shape, read_rows)


def whole_windows(
    windows: Windows, hidden: torch.Tensor
) -> tuple[Windows, torch.Tensor, torch.Tensor]:
    """Pads windows and the hidden states `[T, H]` of their rows to whole windows, for groups with
    rules that only the host knows. Rows that the device gave to other requests are filled with
    copies of the request's last row; no draft there is accepted. The third is `read_rows` of
    `WindowResult`."""
    assert windows.part is not None
    read_rows = windows.part.padded_rows.flatten()
    return replace(windows, part=None), hidden.index_select(0, read_rows), read_rows


def _way_of_sampling(requests: list[LlmRequest]) -> bool | None:
    """As `GraphKey.sampled`; None where a request's rules need more than a graph knows."""
    needed = set(map(_graph_samples, requests))
    return None if None in needed else True in needed
