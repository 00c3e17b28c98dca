"""An EAGLE-3 head in launches of its own after the target's (two-model path).

The head drafts in the round whose states it reads: after a replayed round its own graph is
launched, after an eager forward it drafts eagerly. Its lengths are on the device, so the next
round is launched without waiting for the host."""

from collections.abc import Iterable

import torch

from tllm_spec.draft_shape import DraftShape
from tllm_spec.executor.batch import SampledTokens, ScheduledBatch
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.graphs.cuda_graphs import CudaGraphs
from tllm_spec.executor.graphs.slot_graphs import GraphKey
from tllm_spec.executor.resources.interface import ResourceManager
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.draft_backlog import DraftBacklog
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.executor.speculative.drafting.drafter import report_ready_drafts
from tllm_spec.executor.speculative.drafting.graph_drafter import GraphDrafter
from tllm_spec.executor.speculative.drafting.round_end import WindowResult
from tllm_spec.executor.speculative.drafting.worker import DraftWorker
from tllm_spec.kernels.row_copies import gather_rows


class HeadDrafter(DraftWorker, GraphDrafter):
    """Drafts with an EAGLE head or MTP modules, in CUDA graphs of its own. Each graph reads the
    results of the target's graph with the same key where that left them.

    The head's graphs are captured after all of the target's. So none of their temporary tensors is
    in memory that holds the target's results, which can still be read after them."""

    drafts_ahead = True

    def __init__(
        self,
        layers: DraftLayers,
        slots: SlotState,
        groups: RowGroups,
        sampling: DraftSampling,
        backlog: DraftBacklog,
        dummy_slot: int,
    ) -> None:
        super().__init__(layers, slots, groups, sampling, backlog)
        self._max_len = layers.rows.max_len
        self._dummy_slot = dummy_slot
        self._target: CudaGraphs | None = None

    def prepare_draft_tokens(
        self, scheduled_requests: ScheduledBatch, resource_manager: ResourceManager | None = None
    ) -> None:
        report_ready_drafts(scheduled_requests)

    def in_graph(self, group: RowGroup, windows: WindowResult, shape: DraftShape) -> None:
        """Nothing: the head has a graph of its own."""

    def in_tail(self, group: RowGroup, windows: WindowResult, shape: DraftShape) -> None:
        super().in_graph(group, windows, shape)

    def after_replay(self, slots: list[int], shape: DraftShape, is_sampled: bool) -> None:
        assert self.graphs is not None, "the head's graphs are captured with the target's"
        replayed = self.graphs.run(slots, shape, is_sampled)
        assert replayed is not None, "the head has a graph for each of the target's"

    def keys(self, of_rounds: list[GraphKey], asked: Iterable[GraphKey]) -> list[GraphKey]:
        return of_rounds

    def run_round_before(self, key: GraphKey) -> None:
        assert self._target is not None
        self._target.replay([self._dummy_slot] * key.batch_size, key.shape, key.sampled)

    def capture_drafting(self, rounds: CudaGraphs, keys: list[GraphKey]) -> None:
        self._target = rounds
        super().capture_drafting(rounds, keys)

    def draft_from_slots(self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool) -> None:
        assert self._target is not None
        result = self._target.result(GraphKey(len(slot_ids), shape, sampled))
        self._draft_for(slot_ids, result, shape, sampled, self._max_len)

    def draft_for_dummies(
        self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool, max_kv_len: int
    ) -> torch.Tensor:
        """After windows of as many drafts, all of them accepted."""
        tokens = slot_ids.new_zeros((len(slot_ids), shape.path))
        rows = torch.arange(shape.path, device=slot_ids.device).expand_as(tokens)
        lens = torch.full_like(slot_ids, shape.path)
        result = SampledTokens(tokens, lens, rows if self._slots.shapes.has_trees else None)
        self._draft_for(slot_ids, result, shape, sampled, min(max_kv_len, self._max_len))
        return self._slots.num_drafts[-1:]

    def _draft_for(
        self,
        slot_ids: torch.Tensor,
        result: SampledTokens,
        shape: DraftShape,
        sampled: bool,
        max_kv_len: int,
    ) -> None:
        """After windows of the slots `[B]`, whose lengths have advanced by `result.new_lens`. The
        dummy slot's may not have. max_kv_len: of the drafts."""
        group = self._groups.of_slots(slot_ids, 1, sampled=sampled)
        first = (gather_rows(self._slots.kv_lens, slot_ids) - result.new_lens).clamp_min(0)
        longest = max_kv_len - shape.depth + (shape.window - shape.path)
        windows = Windows(slot_ids, first, result.new_tokens, longest)
        self.draft(None, WindowResult(windows, result, shape), group, shape)
