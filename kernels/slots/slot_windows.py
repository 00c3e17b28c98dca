"""Updates of the slots' windows between sampling and the next forward: accept drafts and advance
the slots, and write new drafts. On CUDA one Triton kernel each, elsewhere the plain-torch
references."""

import torch

from tllm_spec.kernels.dispatch import tl, triton, with_kernel
from tllm_spec.kernels.launch import begin, programmatic_launch
from tllm_spec.kernels.sampling.gumbel import COIN_DOMAIN, uniform
from tllm_spec.kernels.slots.accept import SlotTables, SyntheticRates, accept_by_rates, accept_chain


@with_kernel("accept_windows_triton", argument=1)
def accept_windows(
    tables: SlotTables,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    targets: torch.Tensor,
    synthetic: SyntheticRates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accepts the drafts in the windows of slots `[B]` and advances these slots. kv_lens `[B]`: of
    these slots; targets `[B, W]`, contiguous: the target's token after each window position.

    Returns emitted tokens `[B, W]` and their numbers `[B]`. Duplicate slots (padding) keep one of
    their results."""
    length = targets.shape[1] - 1
    tokens = targets
    drafts = tables.window.index_select(0, slots)[:, 1 : 1 + length]
    # A slot may hold more drafts than this round verifies.
    num_drafts = tables.num_drafts.index_select(0, slots).clamp_max(length)
    if synthetic is None:
        lens = accept_chain(targets, drafts, num_drafts)
    else:
        coins = uniform(synthetic.seeds.index_select(0, slots), kv_lens + 1, COIN_DOMAIN)
        tokens, lens = accept_by_rates(targets, drafts, num_drafts, synthetic.rates, coins)
    advance(tables, slots, kv_lens, tokens, lens)
    return tokens, lens


@with_kernel("write_drafts_triton", argument=1)
def write_drafts(
    tables: SlotTables,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    draft_limits: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> None:
    """Writes drafts `[B, K]` into the windows of slots `[B]`; draft_limits `[S]` int64: most drafts
    that a slot may verify; num_drafts `[B]` int64: how many of them it has, None: K."""
    length = drafts.shape[1]
    tables.window[slots, 1 : 1 + length] = drafts
    limits = draft_limits.index_select(0, slots)
    tables.num_drafts[slots] = limits.clamp_max(length if num_drafts is None else num_drafts)


def advance(
    tables: SlotTables,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    new_tokens: torch.Tensor,
    new_lens: torch.Tensor,
) -> None:
    """The second half of `accept_windows`: `new_lens` `[B]` of `new_tokens` `[B, W]` are emitted.

    An invalid token (-1) is stored as 0: the next round may be launched before the host has seen
    it, and its embedding must exist. No draft is valid until a drafter writes one."""
    last = (new_lens - 1).unsqueeze(1)
    bonus = tables.window[slots, 0]
    tail = torch.cat((bonus.unsqueeze(1), new_tokens), dim=1).gather(
        1, torch.cat((last, last + 1), dim=1)
    )
    tables.previous_token[slots] = tail[:, 0]
    tables.window[slots, 0] = tail[:, 1].clamp_min(0)
    tables.num_drafts.index_fill_(0, slots, 0)
    tables.kv_lens[slots] = kv_lens + new_lens


# They replace about 25 and 4 launches of plain torch per round, and 90 more with synthetic
# acceptance (Philox in plain torch).


def accept_windows_triton(
    tables: SlotTables,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    targets: torch.Tensor,
    synthetic: SyntheticRates | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `accept_windows`."""
    assert targets.is_contiguous()
    batch, width = targets.shape
    tokens, lens = torch.empty_like(targets), torch.empty_like(slots)
    _accept[(batch,)](
        tables.kv_lens,
        tables.window,
        tables.window.stride(0),
        tables.num_drafts,
        tables.previous_token,
        slots,
        kv_lens,
        targets,
        synthetic.rates if synthetic else None,
        synthetic.seeds if synthetic else None,
        synthetic.seeds.stride(0) if synthetic else 0,
        tokens,
        lens,
        width,
        triton.next_power_of_2(width),
        COIN_DOMAIN,
        **programmatic_launch(slots.device),
        num_warps=1,
    )
    return tokens, lens


def write_drafts_triton(
    tables: SlotTables,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    draft_limits: torch.Tensor,
    num_drafts: torch.Tensor | None = None,
) -> None:
    """See `write_drafts`."""
    batch, length = drafts.shape
    _write[(batch,)](
        tables.window,
        tables.window.stride(0),
        tables.num_drafts,
        slots,
        drafts,
        drafts.stride(0),
        drafts.stride(1),
        draft_limits,
        num_drafts,
        length,
        triton.next_power_of_2(length),
        **programmatic_launch(slots.device),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["seeds_stride"])  # type: ignore[untyped-decorator]  # triton has no types
def _accept(
    all_kv_lens: tl.tensor,
    windows: tl.tensor,
    windows_stride: tl.tensor,
    all_num_drafts: tl.tensor,
    previous_tokens: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    targets: tl.tensor,
    rates: tl.tensor,
    seeds: tl.tensor,
    seeds_stride: tl.tensor,
    tokens: tl.tensor,
    lens: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    coin_domain: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The first rejected draft ends the accepted run."""
    begin(PDL)
    request, column = tl.program_id(0), tl.arange(0, block)
    slot, kv_len = tl.load(slots + request), tl.load(kv_lens + request)
    window = windows + slot * windows_stride
    is_draft = column < width - 1
    bonus = tl.load(window)
    drafts = tl.load(window + 1 + column, mask=is_draft, other=-1)
    chosen = tl.load(targets + request * width + column, mask=column < width, other=-1)
    num_drafts = tl.minimum(tl.load(all_num_drafts + slot), width - 1)
    if rates is None:
        accepted = (chosen == drafts) & (column < num_drafts)
        num_accepted = tl.min(tl.where(accepted, block, column), axis=0)
    else:
        zeros = tl.zeros_like(column)
        seed = tl.load(seeds + slot * seeds_stride)
        word, _, _, _ = tl.philox(
            seed, zeros, zeros + (kv_len + 1).to(tl.int32), zeros + coin_domain, zeros
        )
        coin = (word.to(tl.float64) + 0.5) * (1.0 / 4294967296.0)
        wins = is_draft & (coin < tl.load(rates + column, mask=is_draft, other=0.0))
        num_accepted = tl.minimum(tl.sum(wins.to(tl.int32), axis=0), num_drafts.to(tl.int32))
        chosen = tl.where(column < num_accepted, drafts, chosen)
    last = tl.max(tl.where(column == num_accepted, chosen, -1), axis=0)
    before = tl.max(tl.where(column == num_accepted - 1, chosen, -1), axis=0)
    num_new = num_accepted.to(tl.int64) + 1
    tl.store(tokens + request * width + column, chosen, mask=column < width)
    tl.store(lens + request, num_new)
    tl.store(previous_tokens + slot, tl.where(num_accepted == 0, bonus, before))
    tl.store(window, tl.maximum(last, 0))
    tl.store(all_num_drafts + slot, tl.zeros_like(slot))
    tl.store(all_kv_lens + slot, kv_len + num_new)


@triton.jit(do_not_specialize=["drafts_row_stride", "drafts_stride"])  # type: ignore[untyped-decorator]  # triton has no types
def _write(
    windows: tl.tensor,
    windows_stride: tl.tensor,
    all_num_drafts: tl.tensor,
    slots: tl.tensor,
    drafts: tl.tensor,
    drafts_row_stride: tl.tensor,
    drafts_stride: tl.tensor,
    draft_limits: tl.tensor,
    num_drafts: tl.tensor,
    length: tl.constexpr,
    block: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    begin(PDL)
    request, column = tl.program_id(0), tl.arange(0, block)
    slot = tl.load(slots + request)
    exists = column < length
    tokens = tl.load(drafts + request * drafts_row_stride + column * drafts_stride, mask=exists)
    tl.store(windows + slot * windows_stride + 1 + column, tokens, mask=exists)
    limit = tl.minimum(tl.load(draft_limits + slot), length)
    if num_drafts is not None:
        limit = tl.minimum(limit, tl.load(num_drafts + request))
    tl.store(all_num_drafts + slot, limit)
