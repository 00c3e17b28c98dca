"""Chooses between two sources of drafts for each slot, a draft network and the match of the text's
end, by what drafts of both were worth after matches of that length.

Every round tells the worth of both: the drafts that were not verified are compared with the emitted
tokens, too. On CUDA one Triton kernel each, elsewhere the plain-torch references."""

from dataclasses import dataclass

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch

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


@with_kernel("observe_drafts_triton", argument=1)
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


@with_kernel("choose_drafts_triton", argument=1)
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
    await_drafts(sources, slots, network, match.where(lengths.unsqueeze(1) > 0, -1))
    sources.choices[slots] = torch.stack((classes.to(torch.int32), chosen), dim=1)
    return match.where(chosen.unsqueeze(1) > 0, network)


def await_drafts(
    sources: DraftSources, slots: torch.Tensor, network: torch.Tensor, match: torch.Tensor
) -> None:
    """The drafts of both sources `[B, D]` become pending; -1: none."""
    draft_len = match.shape[1]
    both = torch.stack((network, match), dim=1).to(torch.int32)
    sources.pending[slots, :, :draft_len] = both
    sources.pending[:, :, draft_len:].index_fill_(0, slots, -1)  # in a graph: -1 is no tensor


def observe_drafts_triton(
    sources: DraftSources,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    lens: torch.Tensor,
    learns: bool,
) -> None:
    """See `observe_drafts`."""
    assert tokens.is_contiguous() and slots.is_contiguous() and lens.is_contiguous()
    num_slots, _, max_draft_len = sources.pending.shape
    _observe[(len(sources.counts),)](
        *vars(sources).values(),
        slots,
        tokens,
        lens,
        len(slots),
        num_slots - 1,
        tokens.shape[1],
        max_draft_len,
        learns,
        MAX_COUNT,
        PRIOR,
        triton.next_power_of_2(len(slots)),
        **programmatic_launch(slots.device, 4),
    )


def choose_drafts_triton(
    sources: DraftSources,
    slots: torch.Tensor,
    network: torch.Tensor,
    match: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """See `choose_drafts`."""
    assert network.is_contiguous() and match.is_contiguous() and slots.is_contiguous()
    chosen, max_draft_len = torch.empty_like(network), sources.pending.shape[2]
    _choose[(len(slots),)](
        sources.pending,
        sources.choices,
        sources.takes_match,
        slots,
        network,
        match,
        lengths,
        chosen,
        len(sources.takes_match),
        network.shape[1],
        max_draft_len,
        triton.next_power_of_2(max_draft_len),
        **programmatic_launch(slots.device, 1),
    )
    return chosen


@triton.jit(do_not_specialize=["num_requests", "dummy"])
def _observe(
    pending: tl.tensor, choices: tl.tensor, counts: tl.tensor, priors: tl.tensor,
    takes_match: tl.tensor, totals: tl.tensor, slots: tl.tensor, tokens: tl.tensor, lens: tl.tensor,
    num_requests: tl.tensor, dummy: tl.tensor, width: tl.constexpr, max_draft_len: tl.constexpr,
    learns: tl.constexpr, max_count: tl.constexpr, prior: tl.constexpr, block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """`network` and `match` say whose drafts so far were right."""
    begin(PDL)
    own = tl.program_id(0)
    request = tl.arange(0, block)
    slot = tl.load(slots + request, mask=request < num_requests, other=dummy)
    of_class = tl.load(choices + slot * 2, mask=slot != dummy, other=-1)
    is_own = of_class == own
    chosen = tl.load(choices + slot * 2 + 1, mask=is_own, other=0)
    known = tl.load(lens + request, mask=is_own, other=0)
    drafts = pending + slot * (2 * max_draft_len)
    first = tl.load(drafts + chosen * max_draft_len, mask=is_own, other=-1)
    network, match = is_own, is_own
    num_right = tl.zeros([block], tl.int64)
    network_cell = counts + own * (4 * max_draft_len)
    match_cell = network_cell + 2 * max_draft_len
    network_prior, match_prior = tl.load(priors + own * 2), tl.load(priors + own * 2 + 1)
    network_chance, match_chance, network_sum, match_sum = 1.0, 1.0, 0.0, 0.0
    shift = own * 0
    for place in range(max_draft_len):
        is_known = is_own & (place < width) & (place < known)
        token = tl.load(tokens + request * width + place, mask=is_known, other=-1)
        network, tried, right = _compared(drafts + place, token, network & is_known, network_cell)
        if place == 0:
            shift = (tried > max_count).to(tl.int32)
        network_rate = _stored(network_cell, tried >> shift, right >> shift, network_prior, prior)
        of_match = drafts + max_draft_len + place
        match, tried, right = _compared(of_match, token, match & is_known, match_cell)
        match_rate = _stored(match_cell, tried >> shift, right >> shift, match_prior, prior)
        num_right += tl.where(chosen > 0, match, network).to(tl.int64)
        if learns:
            network_chance *= network_rate
            match_chance *= match_rate
            network_sum += network_chance
            match_sum += match_chance
            taken = ((match_sum > network_sum) & (own > 0)).to(tl.int32)
            tl.store(takes_match + own * (max_draft_len + 1) + place + 1, taken)
        network_cell += 2
        match_cell += 2
    # All of the first drafts are read before any is forgotten.
    tl.debug_barrier()
    tl.store(drafts, tl.full([block], -1, tl.int32), mask=is_own)
    tl.store(drafts + max_draft_len, tl.full([block], -1, tl.int32), mask=is_own)
    if width > 1:
        num_right = tl.minimum(num_right, known - 1)
        for source in tl.static_range(2):
            is_source = is_own & (chosen == source) & (first >= 0)
            total = totals + own * 4 + source * 2
            tl.store(total, tl.load(total) + tl.sum(is_source.to(tl.int64), axis=0))
            accepted = tl.sum(tl.where(is_source, num_right, 0), axis=0)
            tl.store(total + 1, tl.load(total + 1) + accepted)


@triton.jit
def _compared(
    drafts: tl.tensor, token: tl.tensor, is_tried: tl.tensor, cell: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Whether each draft is right, and the counts of a place with these."""
    draft = tl.load(drafts, mask=is_tried, other=-1)
    is_tried = is_tried & (draft >= 0)
    is_right = is_tried & (draft == token)
    tried = tl.load(cell) + tl.sum(is_tried.to(tl.int32), axis=0)
    return is_right, tried, tl.load(cell + 1) + tl.sum(is_right.to(tl.int32), axis=0)


@triton.jit
def _stored(
    cell: tl.tensor, tried: tl.tensor, right: tl.tensor, num_right: tl.tensor, number: tl.constexpr
) -> tl.tensor:
    """Stores the counts of a place. Returns the rate of right drafts, with `num_right` of `number`
    that were taken to be seen before."""
    tl.store(cell, tried)
    tl.store(cell + 1, right)
    return (right + num_right) / (tried + number)


@triton.jit(do_not_specialize=["num_classes"])
def _choose(
    pending: tl.tensor, choices: tl.tensor, takes_match: tl.tensor, slots: tl.tensor,
    network: tl.tensor, match: tl.tensor, lengths: tl.tensor, drafts: tl.tensor,
    num_classes: tl.tensor, width: tl.constexpr, max_draft_len: tl.constexpr, block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    begin(PDL)
    request, column = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    slot, length = tl.load(slots + request), tl.load(lengths + request)
    own = tl.minimum(length, num_classes - 1)
    chosen = tl.load(takes_match + own * (max_draft_len + 1) + width)
    is_draft, exists = column < width, column < max_draft_len
    of_network = tl.load(network + request * width + column, mask=is_draft, other=-1)
    of_match = tl.load(match + request * width + column, mask=is_draft, other=-1)
    place = pending + slot * (2 * max_draft_len) + column
    tl.store(place, of_network.to(tl.int32), mask=exists)
    pending_match = tl.where(length > 0, of_match, -1)
    tl.store(place + max_draft_len, pending_match.to(tl.int32), mask=exists)
    tl.store(choices + slot * 2, own.to(tl.int32))
    tl.store(choices + slot * 2 + 1, chosen)
    taken = tl.where(chosen > 0, of_match, of_network)
    tl.store(drafts + request * width + column, taken, mask=is_draft)
