"""Drafts trees with a draft network on the target's pages.

Dynamic trees (EAGLE-2): K beams grow for S steps, and the best of all their candidates become the
nodes of the next window. Static trees: the layout says which candidates become nodes. S steps need
S - 1 forwards of the network, since the last candidates are not read by it.

What the network reads is stored after the accepted tokens, step by step. A mask lets each draft see
its own ancestors only."""

from collections.abc import Sequence
from functools import cache

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.engine.rows import TreeRows, Windows
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.kernels.attention.visible_keys import TreeMask
from tllm_spec.kernels.drafts.draft_beams import (
    BeamPool,
    add_last,
    first_beams,
    grow,
    select,
)
from tllm_spec.kernels.drafts.draft_layout import DraftLayout, StaticStep, static_steps
from tllm_spec.kernels.slots.accept import DraftTree
from tllm_spec.kernels.slots.row_copies import gather_rows


class TreeDrafting:
    """Grows draft trees. Its methods are functions of device tensors, so that a CUDA graph can hold
    them. with_scores: as `DraftTree.scores`."""

    def __init__(
        self,
        layers: DraftLayers,
        sampling: DraftSampling,
        device: torch.device,
        *,
        with_scores: bool = False,
    ) -> None:
        self._layers, self._sampling, self._device = layers, sampling, device
        self._with_scores = with_scores
        self._static = cache(self._static_tree)

    def draft(
        self,
        group: RowGroup,
        shape: DraftShape,
        kv_lens: torch.Tensor,
        state: torch.Tensor,
        bound: int,
    ) -> DraftTree:
        """Drafts of this shape for the group, one row each. kv_lens `[N]`: of the slots. state `[N,
        H]`: of the last tokens that the network has read; bound: of the KV lengths up to them."""
        growth = _Growth(self._layers, self._sampling, group, kv_lens, shape.topk, bound)
        if shape.choices:
            return self._draft_static(growth, shape, state)
        return self._draft_dynamic(growth, shape, state)

    def draft_block(
        self, group: RowGroup, shape: DraftShape, kv_lens: torch.Tensor, states: torch.Tensor
    ) -> DraftTree:
        """states `[S * N, H]`: of step after step, from one forward. A step's candidates are the
        same after every path. Otherwise as `draft`."""
        growth = _BlockGrowth(self._layers, self._sampling, group, kv_lens, shape.topk, 0)
        growth.states = torch.split(states, len(kv_lens))
        draft = self._draft_static if shape.choices else self._draft_dynamic
        return draft(growth, shape, growth.states[0])

    def _draft_dynamic(
        self, growth: "_Growth", shape: DraftShape, state: torch.Tensor
    ) -> DraftTree:
        topk = shape.topk
        pool = BeamPool.allocate(len(growth.kv_lens), topk, shape.depth, state.device)
        beams = first_beams(pool, *growth.candidates(0, state))
        for step in range(1, shape.depth):
            # The K first beams all continue the same row.
            parents = (beams.rows if step > 1 else beams.rows // topk).flatten()
            num_before = (step - 1) * topk
            state = growth.read(step, beams.tokens, beams.bits, num_before, state, parents)
            probs, tokens = growth.candidates(step, state)
            children = probs.view(-1, topk, topk), tokens.view(-1, topk, topk)
            if step + 1 == shape.depth:
                add_last(pool, step, beams, *children)
            else:
                beams = grow(pool, step, beams, *children)
        return select(pool, shape.num_nodes, self._with_scores)

    def _draft_static(self, growth: "_Growth", shape: DraftShape, state: torch.Tensor) -> DraftTree:
        steps, layout = self._static(shape)
        batch, num_read, found = len(growth.kv_lens), 0, list[torch.Tensor]()
        scores, before = list[torch.Tensor](), state.new_ones((), dtype=torch.float32)
        for index, step in enumerate(steps):
            probs, tokens = growth.candidates(index, state)
            own = step.take(tokens.view(batch, -1, shape.topk))
            found.append(own)
            if self._with_scores:
                scores.append(step.take(probs.view(batch, -1, shape.topk) * before))
                before = scores[-1].index_select(1, step.runs).unsqueeze(2)
            if index + 1 < len(steps):
                num_rows, num_parents = len(step.runs), len(state) // batch
                firsts = torch.arange(0, len(state), num_parents, device=state.device)
                parents = (firsts.unsqueeze(1) + step.parent_rows).flatten()
                bits = step.bits.expand(batch, num_rows).contiguous()
                read = own.index_select(1, step.runs)
                state = growth.read(index + 1, read, bits, num_read, state, parents)
                num_read += num_rows
        parents, depths, bits = (each.expand(batch, -1) for each in layout)
        of_nodes, tokens = torch.cat(scores, dim=1) if scores else None, torch.cat(found, dim=1)
        rows = {"parents": parents, "depths": depths, "bits": bits}
        return DraftTree(tokens, **rows, scores=of_nodes)

    def _static_tree(
        self, shape: DraftShape
    ) -> tuple[list[StaticStep], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """The steps of a static tree, and its parents, depths and bits."""
        layout, device = DraftLayout.from_paths(shape.choices), self._device
        parents, depths, bits = (
            torch.tensor(each, dtype=torch.int64, device=device)
            for each in (layout.parents, layout.depths, layout.bits)
        )
        return static_steps(layout, device), (parents, depths, bits)


class _Growth:
    """What the steps of one round share: N requests, with their lengths kv_lens `[N]`."""

    def __init__(
        self,
        layers: DraftLayers,
        sampling: DraftSampling,
        group: RowGroup,
        kv_lens: torch.Tensor,
        topk: int,
        bound: int,
    ) -> None:
        self.kv_lens = kv_lens
        self._layers, self._sampling = layers, sampling
        self._group, self._topk, self._bound = group, topk, bound
        # See DraftNet.lookahead: a head's entry of a draft is at the position before it.
        self._first = kv_lens if layers.net.lookahead else kv_lens + 1

    def candidates(self, step: int, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best next tokens after each row and their probabilities, `[N * n, K]`, best first.
        state `[N * n, H]`: after `step` drafts."""
        logits = self._layers.net.compute_logits(state)
        return self._sampling.best(self._group, logits, self.kv_lens + (1 + step), self._topk)

    def read(
        self,
        depth: int,
        tokens: torch.Tensor,
        bits: torch.Tensor,
        num_before: int,
        state: torch.Tensor,
        parents: torch.Tensor,
    ) -> torch.Tensor:
        """The states after drafts tokens `[N, R]` of a depth (from 1 on), `[N * R, H]`.

        bits `[N, R]`: which of all drafts read in this round each sees; num_before: those of
        earlier steps. state `[N * n, H]`: of the step before; parents `[N * R]`: its rows that
        these drafts continue."""
        length = num_before + tokens.shape[1]
        if not self._layers.net.reads_tokens_only:
            state = gather_rows(state, parents)
        depths = torch.full_like(tokens, depth - 1)
        windows = Windows(
            self._group.slots,
            self._first,
            tokens,
            min(self._bound + length, self._layers.rows.max_len),
            tree=TreeRows(depths, TreeMask(bits, length), num_before),
        )
        return self._layers.forward([], windows, state, step=depth)


class _BlockGrowth(_Growth):
    """Steps whose states are there. `states`: of each step, `[N, H]`."""

    states: Sequence[torch.Tensor]

    def read(
        self,
        depth: int,
        tokens: torch.Tensor,
        bits: torch.Tensor,
        num_before: int,
        state: torch.Tensor,
        parents: torch.Tensor,
    ) -> torch.Tensor:
        """The step's state for each draft."""
        return self.states[depth].repeat_interleave(tokens.shape[1], dim=0)
