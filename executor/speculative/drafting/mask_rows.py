"""Rows of mask tokens, from which a draft network drafts all tokens in one forward (P-EAGLE, PARD,
DFlash).

They follow the last token that the network has read, and each gives one draft. Their keys and
values lie after those of the request's tokens: the next round writes there what was emitted, as it
does over entries of drafts that were made one after the other."""

import torch
from torch.nn import functional as F

from tllm_spec.executor.engine.rows import TreeRows, Windows
from tllm_spec.executor.speculative.drafting.draft_layers import DraftLayers
from tllm_spec.kernels.attention.visible_keys import MAX_TREE_KEYS, TreeMask
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
    all second ones, and so on. Nothing reads what is after them."""
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


def fill_in(
    layers: DraftLayers,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    newest: torch.Tensor,
    num_drafts: int,
    bound: int,
) -> torch.Tensor:
    """As `read_masks`, of K mask rows after the newest tokens `[N]`, which see each other: `[K * N,
    H]`."""
    masks, width = layers.net.masks, 1 + num_drafts
    assert masks is not None and width <= MAX_TREE_KEYS
    tokens = F.pad(newest.unsqueeze(1), (0, num_drafts), value=masks.token_id)
    everything = -1 if width == MAX_TREE_KEYS else (1 << width) - 1
    places = torch.arange(width, device=slots.device)
    tree = TreeRows(
        places.expand_as(tokens).contiguous(),
        TreeMask(torch.full_like(tokens, everything), width),
        offset=0,
    )
    longest = min(bound + width, layers.rows.max_len)
    windows = Windows(slots, kv_lens, tokens, longest, tree=tree)
    firsts = torch.arange(0, tokens.numel(), width, device=slots.device)
    wanted = (firsts + places[1:].unsqueeze(1)).flatten()
    return layers.forward([], windows, None, wanted=wanted, step=1)
