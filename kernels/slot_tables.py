"""The tables that `slot_windows` works on. This file knows nothing of what is done with them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SlotTables:
    """Rows of slots, int64, what they mean is said in `SlotState`: kv_lens, num_drafts,
    previous_token `[S]`, window `[S, K_max + 1]`."""

    kv_lens: torch.Tensor
    window: torch.Tensor
    num_drafts: torch.Tensor
    previous_token: torch.Tensor


@dataclass(frozen=True)
class SyntheticRates:
    """Acceptance by chance (`accept_by_rates`). seeds `[S]`: of the slots, for the coins, any
    stride."""

    rates: torch.Tensor
    seeds: torch.Tensor
