"""Drafts chains with a draft network on the target's pages: one forward of the network for each
draft after the first."""

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.executor.speculative.drafting.proposer import DraftChains


class ChainDrafting:
    """Draws draft after draft. For rejection sampling it keeps what they were drawn from, by slot;
    where requests share a round's rows it says how likely they are."""

    def __init__(self, layers: DraftLayers, slots: SlotState, sampling: DraftSampling) -> None:
        self._layers, self._slots, self._sampling = layers, slots, sampling
        self._probs: torch.Tensor | None = None
        if sampling.keeps_probs:
            width = sampling.width(layers.net.vocab_size)
            size = (len(slots.kv_lens), slots.max_draft_len, width)
            self._probs = torch.zeros(size, dtype=torch.float32, device=slots.device)

    def draft(
        self,
        group: RowGroup,
        shape: DraftShape,
        kv_lens: torch.Tensor,
        state: torch.Tensor,
        bound: int,
    ) -> DraftChains:
        """As `TreeDrafting.draft`."""
        net, positions = self._layers.net, self._slots.positions(kv_lens, shape.depth)
        drafts: list[torch.Tensor] = []
        chances: list[torch.Tensor] = []
        for step in range(shape.depth):
            if step:
                # The draft before is at position kv_lens + step; see DraftNet.lookahead for its
                # position in the draft cache.
                first = positions[step - net.lookahead]
                window = Windows(group.slots, first, drafts[-1].unsqueeze(1), bound + step)
                state = self._layers.forward([], window, state, step=step)
            logits = net.compute_logits(state)
            if self._slots.values is not None:
                chance, best = self._sampling.best(group, logits, positions[1 + step], 1)
                chances.append(chance.squeeze(1))
                drafts.append(best.squeeze(1))
                continue
            tokens, probs = self._sampling.choose(group, step, logits, positions[1])
            drafts.append(tokens)
            if probs is not None:
                assert self._probs is not None
                self._probs[group.slots, step] = probs
        likely = torch.stack(chances, dim=1) if chances else None
        return DraftChains(torch.stack(drafts, dim=1), likely=likely)

    def probs(self, group: RowGroup) -> torch.Tensor | None:
        """As `RoundEnd.draft_probs`."""
        if self._probs is None or group.rows.window == 1:
            return None
        probs = self._probs.index_select(0, group.slots)[:, : group.rows.window - 1]
        return self._sampling.spread(probs)
