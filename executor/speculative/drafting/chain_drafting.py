"""Drafts chains with a draft network: one forward of the network for each draft after the first, or
all drafts from the states of one forward."""

import torch

from tllm_spec.config.draft_shape import DraftShape
from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.resources.slot_state import SlotState
from tllm_spec.executor.sampling.draft_sampling import DraftSampling
from tllm_spec.executor.sampling.row_group import RowGroup
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.kernels.slots.accept import Drafts


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
    ) -> Drafts:
        """As `TreeDrafting.draft`."""
        net, positions = self._layers.net, self._slots.positions(kv_lens, shape.depth)
        drawn: list[_Drawn] = []
        for step in range(shape.depth):
            if step:
                # The draft before is at position kv_lens + step; see DraftNet.lookahead for its
                # position in the draft cache.
                first = positions[step - net.lookahead]
                window = Windows(group.slots, first, drawn[-1][0].unsqueeze(1), bound + step)
                state = self._layers.forward([], window, state, step=step)
            drawn.append(self._draw(group, step, net.compute_logits(state), positions))
        return _chains(drawn)

    def draft_block(
        self, group: RowGroup, shape: DraftShape, kv_lens: torch.Tensor, states: torch.Tensor
    ) -> Drafts:
        """states `[K * N, H]`: those of all first drafts, then those of all second ones, and so
        on. Otherwise as `draft`."""
        positions = self._slots.positions(kv_lens, shape.depth)
        logits = torch.split(self._layers.net.compute_logits(states), len(group.slots))
        return _chains([self._draw(group, step, own, positions) for step, own in enumerate(logits)])

    def _draw(
        self, group: RowGroup, step: int, logits: torch.Tensor, positions: torch.Tensor
    ) -> "_Drawn":
        """Draft `step` of each request, `[N]`, and where requests share rows how likely it is."""
        if self._slots.values is not None:
            chance, best = self._sampling.best(group, logits, positions[1 + step], 1)
            return best.squeeze(1), chance.squeeze(1)
        tokens, probs = self._sampling.choose(group, step, logits, positions[1])
        if probs is not None:
            assert self._probs is not None
            self._probs[group.slots, step] = probs
        return tokens, None

    def probs(self, group: RowGroup) -> torch.Tensor | None:
        """As `RoundEnd.draft_probs`."""
        if self._probs is None or group.rows.window == 1:
            return None
        probs = self._probs.index_select(0, group.slots)[:, : group.rows.window - 1]
        return self._sampling.spread(probs)


_Drawn = tuple[torch.Tensor, torch.Tensor | None]


def _chains(drawn: list[_Drawn]) -> Drafts:
    tokens = torch.stack([each for each, _ in drawn], dim=1)
    chances = [chance for _, chance in drawn if chance is not None]
    return Drafts(tokens, likely=torch.stack(chances, dim=1) if chances else None)
