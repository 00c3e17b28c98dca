"""Draft/Target with trees in the draft model's own engine (two-model path).

The accepted path is not in the draft cache where it belongs, so a round of drafts first reads what
the target emitted in the round before: its run of tokens, and the token before the run. The hooks
of the target's rounds keep these tokens on the device, slot by slot."""

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.batch import ScheduledBatch
from tllm_spec.executor.device.device_span import DeviceSpan
from tllm_spec.executor.engine.model_engine import ModelEngine
from tllm_spec.executor.engine.rows import ContextChunk, Windows
from tllm_spec.executor.request import LlmRequest
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup, RowGroups
from tllm_spec.executor.speculative.drafting.draft_kv import DraftKVManager
from tllm_spec.executor.speculative.drafting.draft_layers import TorchLayers
from tllm_spec.executor.speculative.drafting.draft_net import CausalNet
from tllm_spec.executor.speculative.drafting.model_drafter import ModelDrafter
from tllm_spec.executor.speculative.drafting.round_end import WindowResult
from tllm_spec.executor.speculative.drafting.tree_drafting import TreeDrafting
from tllm_spec.kernels.row_copies import gather_rows


class ModelTreeDrafter(ModelDrafter):
    """Drafts trees with a model in its own engine. `_runs` `[S, D + 2]`: the token before each
    slot's latest run, then the run, of which `_run_lens` `[S]` tokens are valid."""

    def __init__(
        self,
        engine: ModelEngine,
        kv: DraftKVManager,
        slots: SlotState,
        groups: RowGroups,
        sampling: DraftSampling,
        max_num_tokens: int,
    ) -> None:
        super().__init__(engine, kv, slots, groups, sampling, max_num_tokens)
        self._model_engine = engine
        depth, num_slots = slots.shapes.longest.depth, len(slots.kv_lens)
        self._lag = depth + 1
        self._runs = torch.zeros((num_slots, depth + 2), dtype=torch.int64, device=slots.device)
        self._run_lens = torch.ones(num_slots, dtype=torch.int64, device=slots.device)
        net = CausalNet(engine.model, sampling.num_target_ids)
        self._trees = TreeDrafting(TorchLayers(net, engine.attention), slots, sampling)
        # Requests whose latest round had drafts: their run is all that the cache lacks.
        self._drafted: set[LlmRequest] = set()

    def launched(self, batch: ScheduledBatch) -> None:
        super().launched(batch)
        self._drafted = {r for r in batch.generation_requests if r.py_num_draft_tokens}

    def tail(self, group: RowGroup, windows: WindowResult, shape: DraftShape) -> None:
        self._keep_runs(windows)

    def after_contexts(
        self,
        batch: ScheduledBatch,
        chunks: list[ContextChunk],
        first_tokens: torch.Tensor | None,
        windows: WindowResult | None,
        *,
        is_timed: bool,
    ) -> DeviceSpan | None:
        if ended := batch.last_chunk_requests:
            slot_ids = self._groups.get(ended, 1).slots
            self._runs[slot_ids, 0] = self._slots.previous_token[slot_ids]
            self._runs[slot_ids, 1] = self._slots.window[slot_ids, 0]
            self._run_lens.index_fill_(0, slot_ids, 1)
        if windows is not None:
            self._keep_runs(windows)
        return None

    def _keep_runs(self, windows: WindowResult) -> None:
        slot_ids, sampled = windows.windows.slots, windows.sampled
        before = windows.windows.token_ids[:, :1]
        runs = torch.cat((before, sampled.new_tokens.clamp_min(0)), dim=1)
        self._runs[slot_ids, : runs.shape[1]] = runs
        self._run_lens[slot_ids] = sampled.new_lens

    def _num_after(self, shape: DraftShape) -> int:
        return max(shape.num_read, self._lag) + 1

    def _is_late(self, request: LlmRequest) -> bool:
        return request.draft_lag > 1 and request not in self._drafted

    def _draft(self, batch: ScheduledBatch, group: RowGroup) -> None:
        longest = max(request.num_tokens_bound for request in group.requests)
        self._draft_trees(self._groups.get(group.requests, 1), batch.shape, longest)

    def _draft_slots(
        self, slot_ids: torch.Tensor, shape: DraftShape, sampled: bool, max_kv_len: int
    ) -> None:
        group = self._groups.of_slots(slot_ids, 1, sampled=sampled)
        self._draft_trees(group, shape, max_kv_len)

    def _draft_trees(self, group: RowGroup, shape: DraftShape, longest: int) -> None:
        """longest: bound of the group's tokens."""
        slots, width = group.slots, self._runs.shape[1]
        lens = gather_rows(self._run_lens, slots)
        # The dummy slot, which pads graphs, has no token before its run.
        first = (gather_rows(self._slots.kv_lens, slots) - lens).clamp_min(0)
        bound = min(longest + width, self._engine.rows.max_len)
        windows = Windows(slots, first, gather_rows(self._runs, slots), bound)
        hidden = self._model_engine.forward([], windows)
        rows = torch.arange(0, len(hidden), width, device=hidden.device) + lens
        tree = self._trees.draft(group, shape, gather_rows(hidden, rows), longest)
        self._slots.write_tree(slots, tree)
