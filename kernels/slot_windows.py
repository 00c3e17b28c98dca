"""Updates of the slots' windows between sampling and the next forward: accept drafts and advance
the slots, and write new drafts. On CUDA one Triton kernel each, elsewhere the plain-torch
references."""

import torch

from tllm_spec.kernels.accept_chain import accept_by_rates, accept_chain
from tllm_spec.kernels.dispatch import with_kernel
from tllm_spec.kernels.gumbel import COIN_DOMAIN, uniform
from tllm_spec.kernels.slot_tables import SlotTables, SyntheticRates


@with_kernel("slot_windows_triton.accept_windows_triton", argument=1)
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


@with_kernel("slot_windows_triton.write_drafts_triton", argument=1)
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
