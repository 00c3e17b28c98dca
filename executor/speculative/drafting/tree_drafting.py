"""Drafts a tree: K beams grow for S steps, and the best of all their candidates become the nodes
of the next window (EAGLE-2's dynamic trees).

S steps need S - 1 forwards of the draft network, since the last candidates are not read by it. The
beams' keys stand after those of the accepted tokens, step by step; a mask lets each beam see its
own ancestors only."""

import torch

from tllm_spec.draft_shape import DraftShape
from tllm_spec.executor.engine.rows import TreeRows, Windows
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.kernels.beam_pool import BeamPool, Beams
from tllm_spec.kernels.draft_beams import (
    add_last,
    first_beams,
    grow,
    select,
)
from tllm_spec.kernels.row_copies import gather_rows
from tllm_spec.kernels.tree_mask import TreeMask


class TreeDrafting:
    """For a draft network on the target's pages."""

    def __init__(self, layers: DraftLayers, slots: SlotState, sampling: DraftSampling) -> None:
        self._layers, self._slots, self._sampling = layers, slots, sampling

    def draft(self, group: RowGroup, shape: DraftShape, state: torch.Tensor, bound: int) -> None:
        """Writes trees of this shape into the slots of the group, one row each. state `[N, H]`: of
        the last tokens that the network has read; bound: of the KV lengths up to them.

        A function of device tensors, so that a CUDA graph can hold it."""
        topk, kv_lens = shape.topk, gather_rows(self._slots.kv_lens, group.slots)
        pool = BeamPool.allocate(len(group.slots), topk, shape.depth, state.device)
        beams = first_beams(pool, *self._candidates(group, 0, state, kv_lens, topk))
        if not self._layers.net.reads_tokens_only:
            state = state.repeat_interleave(topk, dim=0)
        for step in range(1, shape.depth):
            state = self._run(group, step, beams, state, kv_lens, bound + step * topk)
            candidates = self._candidates(group, step, state, kv_lens, topk)
            if step + 1 == shape.depth:
                add_last(pool, step, beams, *candidates)
            else:
                beams = grow(pool, step, beams, *candidates)
        self._slots.write_tree(group.slots, select(pool, shape.num_nodes), shape.depth)

    def _run(
        self,
        group: RowGroup,
        step: int,
        beams: Beams,
        state: torch.Tensor,
        kv_lens: torch.Tensor,
        max_kv_len: int,
    ) -> torch.Tensor:
        """The states after the beams, `[N * K, H]`. state `[N * K, H]`: of the step before."""
        net, (num_rows, topk) = self._layers.net, beams.tokens.shape
        if not net.reads_tokens_only:
            state = state.index_select(0, beams.rows.flatten())
        # See DraftNet.shift: a head's entry of a draft is at the position before it.
        depths = torch.full((num_rows, topk), step - 1, device=state.device)
        windows = Windows(
            group.slots,
            kv_lens + net.shift if net.shift else kv_lens,
            beams.tokens,
            min(max_kv_len, self._layers.rows.max_len),
            tree=TreeRows(depths, TreeMask(beams.bits, step * topk), (step - 1) * topk),
        )
        return self._layers.forward([], windows, state)

    def _candidates(
        self, group: RowGroup, step: int, state: torch.Tensor, kv_lens: torch.Tensor, topk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's best next tokens and their probabilities, `[N, K]` after the root and
        `[N, K, K]` after beams, best first."""
        logits = self._layers.net.compute_logits(state)
        probs, tokens = self._sampling.best(group, logits, kv_lens + (1 + step), topk)
        shape = (len(group.slots), topk) if step == 0 else (len(group.slots), topk, topk)
        return probs.view(shape), tokens.view(shape)
