"""`observe_drafts` and `choose_drafts` as Triton kernels: one program per class of matches, and one
per request. Importing this file imports Triton."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.draft_sources import MAX_COUNT, PRIOR, DraftSources
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin


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
        sources.pending,
        sources.choices,
        sources.counts,
        sources.priors,
        sources.takes_match,
        sources.totals,
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
        **programmatic_launch(slots.device),
        num_warps=4,
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
        **programmatic_launch(slots.device),
        num_warps=1,
    )
    return chosen


@triton.jit(do_not_specialize=["num_requests", "dummy"])  # type: ignore[untyped-decorator]  # triton has no types
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


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _compared(
    drafts: tl.tensor, token: tl.tensor, is_tried: tl.tensor, cell: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Whether each draft is right, and the counts of a place with these."""
    draft = tl.load(drafts, mask=is_tried, other=-1)
    is_tried = is_tried & (draft >= 0)
    is_right = is_tried & (draft == token)
    tried = tl.load(cell) + tl.sum(is_tried.to(tl.int32), axis=0)
    return is_right, tried, tl.load(cell + 1) + tl.sum(is_right.to(tl.int32), axis=0)


@triton.jit  # type: ignore[untyped-decorator]  # triton has no types
def _stored(
    cell: tl.tensor, tried: tl.tensor, right: tl.tensor, num_right: tl.tensor, number: tl.constexpr
) -> tl.tensor:
    """Stores the counts of a place. Returns the rate of right drafts, with `num_right` of `number`
    that were taken to be seen before."""
    tl.store(cell, tried)
    tl.store(cell + 1, right)
    return (right + num_right) / (tried + number)


@triton.jit(do_not_specialize=["num_classes"])  # type: ignore[untyped-decorator]  # triton has no types
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
