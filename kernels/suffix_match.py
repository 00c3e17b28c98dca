"""Drafts that follow an earlier occurrence of the end of a text: the texts of slots on the device,
and the longest match of each text's end. On CUDA one Triton kernel each, elsewhere the plain-torch
references."""

from typing import NamedTuple

import torch

from tllm_spec.kernels.dispatch import with_kernel


class Matches(NamedTuple):
    """What follows the matches of the ends of B texts: drafts `[B, K]`, how many of them are
    proposed (all, or none without a match), and how many tokens match; the latter `[B]`, all
    int64."""

    drafts: torch.Tensor
    num_drafts: torch.Tensor
    lengths: torch.Tensor


@with_kernel("suffix_match_triton.append_tokens_triton")
def append_tokens(
    texts: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Appends to the texts of slots `[B]` what made them as long as they are.

    Args:
        texts: `[S, L]` int32. Tokens beyond L are left out.
        slots: `[B]` int64, contiguous.
        kv_lens: `[S]` int64: the position of each text's last token.
        tokens: `[B, W]` int64, contiguous. An invalid token (-1) is stored as 0.
        lens: `[B]` int64, contiguous: how many of these tokens are the text's last ones.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    positions = (kv_lens.index_select(0, slots) + 1 - lens).unsqueeze(1) + columns
    is_new = (columns < lens.unsqueeze(1)) & (positions < texts.shape[1])
    rows, _ = torch.nonzero(is_new, as_tuple=True)
    texts[slots[rows], positions[is_new]] = tokens[is_new].clamp_min(0).to(texts.dtype)


@with_kernel("suffix_match_triton.match_suffixes_triton")
def match_suffixes(
    texts: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    draft_len: int,
    max_match: int,
) -> Matches:
    """For each of slots `[B]` the longest end of its text, of at most `max_match` tokens, that also
    ends earlier, and of equally long ones the last. Drafts are what follows there. A match that
    overlaps the end goes on as a copy of the drafts; without a match they are the text's last
    token. texts, slots, kv_lens: as `append_tokens`."""
    ends = kv_lens.index_select(0, slots).clamp_max(texts.shape[1] - 1).unsqueeze(1)
    own = texts.index_select(0, slots)[:, : int(ends.max()) + 1].to(torch.int64)
    positions = torch.arange(own.shape[1], device=own.device)
    lens, is_alive = torch.zeros_like(own), positions < ends
    for back in range(max_match):
        last = own.gather(1, (ends - back).clamp_min(0))
        is_alive &= (positions >= back) & (own.roll(back, dims=1) == last)
        if not is_alive.any():
            break
        lens += is_alive
    # Longest first, then last; without a match the position before the end.
    scores = (lens * own.shape[1] + positions + 1).masked_fill_(positions >= ends, 0)
    best = scores.argmax(dim=1, keepdim=True)
    firsts = torch.where(ends > 0, best + 1, 0)
    columns = torch.arange(draft_len, device=own.device) % (ends + 1 - firsts)
    lengths = lens.gather(1, best).squeeze(1)
    return Matches(own.gather(1, firsts + columns), (lengths > 0) * draft_len, lengths)
