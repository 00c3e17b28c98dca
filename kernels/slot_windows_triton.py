"""`accept_windows` and `write_drafts` as Triton kernels, one program per request. Importing this
file imports Triton.

They replace about 25 and 4 launches of plain torch per round, and 90 more with synthetic acceptance
(Philox in plain torch)."""

import torch
import triton
import triton.language as tl

from tllm_spec.kernels.gumbel import COIN_DOMAIN
from tllm_spec.kernels.programmatic_launch import programmatic_launch
from tllm_spec.kernels.programmatic_launch_triton import begin
from tllm_spec.kernels.slot_tables import SlotTables, SyntheticRates


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
