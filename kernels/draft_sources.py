"""Chooses between two sources of drafts for each slot, a draft network and the match of the text's
end, by what drafts of both were worth after matches of that length.

Every round tells the worth of both: the drafts that were not verified are compared with the emitted
tokens, too. On CUDA one Triton kernel each, elsewhere the plain-torch references."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import with_kernel

NETWORK, MATCH = 0, 1
PRIOR = 8  # windows that a class begins with
MAX_COUNT = 4096  # windows of a class, before all its counts are halved


@dataclass(frozen=True)
class DraftSources:
    """What S slots, the last of which is the dummy, know of at most K drafts. Matches are in C
    classes: class c has those of c tokens, the last class also all longer ones.

    pending: `[S, 2, K]` int32, the latest drafts of network and match; -1: none.
    choices: `[S, 2]` int32, the class of the latest match, and the source that was chosen.
    counts: `[C, 2, K, 2]` int32. By class, source and place in the chain: how often all drafts
        before were right and the target's token was emitted, and how often this draft was that.
    priors: `[C, 2]` float32, of PRIOR drafts, how many are taken to have been right before any was
        seen.
    takes_match: `[C, K+1]` int32: 1 where a round of so many drafts takes the match's.
    totals: `[C, 2, 2]` int64. By class and source: verified windows with its drafts, and drafts
        that were accepted in them."""

    pending: torch.Tensor
    choices: torch.Tensor
    counts: torch.Tensor
    priors: torch.Tensor
    takes_match: torch.Tensor
    totals: torch.Tensor


@with_kernel("draft_sources_triton.observe_drafts_triton", argument=1)
def observe_drafts(
    sources: DraftSources,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    learns: bool,
) -> None:
    """Compares the pending drafts of slots `[B]` with what was emitted, and forgets them. Each slot
    but the dummy is there once at most.

    Args:
        tokens: `[B, W]` int64, contiguous, from windows with W-1 drafts.
        lens: `[B]` int64, contiguous: how many of the tokens were emitted.
        learns: whether `takes_match` is renewed: the match's drafts are taken where their expected
            number of accepted drafts is the larger one."""
    is_real = slots != len(sources.pending) - 1
    slots, tokens, lens = slots[is_real], tokens[is_real], lens[is_real]
    classes, chosen = sources.choices.index_select(0, slots).to(torch.int64).unbind(1)
    places = min(sources.pending.shape[2], tokens.shape[1])
    drafts = sources.pending.index_select(0, slots)[:, :, :places]
    is_known = torch.arange(places, device=slots.device) < lens.unsqueeze(1)
    is_known = is_known.unsqueeze(1) & (drafts >= 0)
    is_right = (is_known & (drafts == tokens[:, :places].unsqueeze(1))).cumprod(2)
    before = torch.cat((torch.ones_like(is_right[:, :, :1]), is_right[:, :, :-1]), dim=2)
    seen = torch.stack((is_known & before.bool(), is_right.bool()), dim=-1).to(torch.int32)
    sources.counts[:, :, :places].index_add_(0, classes, seen)
    sources.counts.bitwise_right_shift_((sources.counts[:, :1, :1, :1] > MAX_COUNT).to(torch.int32))
    sources.pending[slots, :, 0] = -1
    if tokens.shape[1] > 1:
        own = torch.arange(len(slots), device=slots.device), chosen
        accepted = torch.minimum(is_right.sum(2)[own], lens - 1)
        figures = torch.stack(((drafts[:, :, 0][own] >= 0).to(torch.int64), accepted), dim=1)
        sources.totals.index_put_((classes, chosen), figures, accumulate=True)
    if learns:
        tried, right = sources.counts.to(torch.float32).unbind(-1)
        rates = (right + sources.priors.unsqueeze(2)) / (tried + PRIOR)
        network, match = rates.cumprod(2).cumsum(2).unbind(1)
        sources.takes_match[1:, 1:] = (match > network)[1:].to(torch.int32)


@with_kernel("draft_sources_triton.choose_drafts_triton", argument=1)
def choose_drafts(
    sources: DraftSources,
    slots: torch.Tensor,
    network: torch.Tensor,
    match: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """The drafts `[B, D]` of slots `[B]`, each row from one of two sources, whose drafts `[B, D]`
    int64, contiguous, become pending. lengths `[B]` int64: of the matches; 0: there is none."""
    draft_len = network.shape[1]
    classes = lengths.clamp_max(len(sources.takes_match) - 1)
    chosen = sources.takes_match[:, draft_len][classes]
    both = torch.stack((network, match.where(lengths.unsqueeze(1) > 0, -1)), dim=1)
    sources.pending[slots, :, :draft_len] = both.to(torch.int32)
    sources.pending[slots, :, draft_len:] = -1
    sources.choices[slots] = torch.stack((classes.to(torch.int32), chosen), dim=1)
    return match.where(chosen.unsqueeze(1) > 0, network)
