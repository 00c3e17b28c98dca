"""Rows of mask tokens, from which a draft network drafts all tokens in one forward (P-EAGLE, PARD).

They follow the last token that the network has read, and each gives one draft. Their keys and
values lie after those of the request's tokens: the next round writes there what was emitted, as it
does over entries of drafts that were made one after the other."""

import torch
from torch.nn import functional as F

from tllm_spec.executor.engine.rows import Windows
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.models.draft_head import Masks


def with_masks(
    windows: Windows,
    state: torch.Tensor | None,
    num_read: torch.Tensor,
    num_drafts: int,
    masks: Masks,
) -> tuple[Windows, torch.Tensor | None, torch.Tensor]:
    """Lets mask rows follow the first num_read `[B]` rows of whole windows, instead of the rest.

    state `[B * W, H]`: of the windows' rows, or None. Returns the windows, K - 1 rows longer, their
    state, and the rows that K drafts come from, `[K * B]`: those of all first drafts, then those of
    all second ones, and so on. What is after them nothing reads."""
    batch, width = windows.token_ids.shape
    num_more, device = num_drafts - 1, num_read.device
    places = torch.arange(width + num_more, device=device)
    is_mask = places >= num_read.unsqueeze(1)
    longer = Windows(
        windows.slots,
        windows.first,
        F.pad(windows.token_ids, (0, num_more)).masked_fill_(is_mask, masks.token_id),
        windows.max_kv_len + num_more,
    )
    if state is not None:
        assert masks.state is not None
        rows = F.pad(state.view(batch, width, -1), (0, 0, 0, num_more))
        state = torch.where(is_mask.unsqueeze(2), masks.state, rows).flatten(0, 1)
    firsts = torch.arange(-1, batch * len(places) - 1, len(places), device=device) + num_read
    return longer, state, (firsts + places[:num_drafts].unsqueeze(1)).flatten()


def read_masks(
    layers: DraftLayers, slots: torch.Tensor, kv_lens: torch.Tensor, num_masks: int, bound: int
) -> torch.Tensor:
    """The states of mask rows after all that slots `[N]` with these lengths `[N]` have read, in a
    forward of their own: `[num_masks * N, H]`, those of all first rows before those of all second
    ones. bound: of the KV lengths before it."""
    net, number = layers.net, len(slots)
    assert net.masks is not None
    tokens = slots.new_full((number, num_masks), net.masks.token_id)
    state = net.masks.state
    if state is not None:
        state = state.expand(number * num_masks, -1).contiguous()
    # See DraftNet.lookahead for the position of an entry in the draft cache.
    first = kv_lens + (1 - net.lookahead)
    windows = Windows(slots, first, tokens, min(bound + num_masks, layers.rows.max_len))
    states = layers.forward([], windows, state)
    return states.view(number, num_masks, -1).transpose(0, 1).flatten(0, 1)
